"""Where images come from: CIFAR-10, a folder for each class, or generated pictures. Each fills the same uint8 arrays."""

import hashlib
import os
import pickle
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock
from PIL import Image, ImageOps

from project.errors import UsageError

Progress = Callable[[int], None]  # called with the number of images done since the last call


class Source(ABC):
    """A data set that can be decoded into arrays.

    Attributes:
        name: What `--data.source` calls it.
        root: The folder it lies in; None where it has none.
        image_size: Height and width of the decoded images, in pixels.
    """

    name: str
    root: Path | None = None
    image_size: int

    def prepare(self) -> None:  # noqa: B027 (most sources have nothing to fetch)
        """Fetch what is not there yet. Called by one process of a machine, before anything below is."""

    @abstractmethod
    def class_names(self) -> list[str]:
        """Return the names of the classes, in the order of their labels."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that changes whenever the images may have, without reading them."""

    @abstractmethod
    def num_images(self) -> dict[str, int]:
        """Return the number of images in each split: "train", "test", and "val" where the source has one."""

    @abstractmethod
    def read(self, split: str, images: np.ndarray, labels: np.ndarray, progress: Progress) -> None:
        """Decode a split into images, uint8 (n, 3, S, S), and labels, int64 (n,)."""


# ---- CIFAR-10


class Cifar10Source(Source):
    """CIFAR-10 as torchvision downloads, checks and reads it; a copy under `root` is used as it is.

    Args:
        root: The folder that holds, or will hold, `cifar-10-batches-py`.
    """

    name = "cifar10"
    image_size = 32

    def __init__(self, root: Path) -> None:
        from torchvision.datasets import CIFAR10  # here, because it takes a second and only this source needs it

        self.dataset_class = CIFAR10
        self.root = root
        self.folder = root / CIFAR10.base_folder
        self.archive = root / CIFAR10.filename

    def is_there(self) -> bool:
        """Return whether the extracted data set lies under `root`."""
        return self.folder.is_dir()

    def prepare(self) -> None:
        """Extract the archive, downloading it first where it is missing; then check every file's MD5.

        Everything happens in a folder of its own that is renamed at the end: an interrupted download is never taken
        for a whole one.

        Raises:
            UsageError: Offline, or a file is damaged.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with FileLock(self.root / ".cifar10.lock"):
            if not self.is_there():
                self._fetch()
        for name, expected in self._checksums():
            _check_md5(self.folder / name, expected, f"delete {self.folder}, it will be made again")

    def class_names(self) -> list[str]:
        """Return CIFAR-10's ten names."""
        with open(self.folder / self.dataset_class.meta["filename"], "rb") as file:
            return list(pickle.load(file, encoding="latin1")[self.dataset_class.meta["key"]])  # its MD5 was checked

    def fingerprint(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        return _stat_digest(self.folder, (self.folder / name for name, _ in self._checksums()))

    def num_images(self) -> dict[str, int]:
        """Return the sizes of the two halves, by reading them."""
        return {split: len(self._dataset(split)) for split in ("train", "test")}

    def read(self, split: str, images: np.ndarray, labels: np.ndarray, progress: Progress) -> None:
        """Copy a half out of torchvision's data set."""
        dataset = self._dataset(split)
        images[:] = dataset.data.transpose(0, 3, 1, 2)
        labels[:] = dataset.targets
        progress(len(labels))

    def _dataset(self, split: str):  # type: ignore[no-untyped-def]
        return self.dataset_class(str(self.root), train=split == "train")

    def _checksums(self) -> list[tuple[str, str]]:
        meta = self.dataset_class.meta
        files = [*self.dataset_class.train_list, *self.dataset_class.test_list, [meta["filename"], meta["md5"]]]
        return [(name, md5) for name, md5 in files]

    def _fetch(self) -> None:
        staging = self.root / ".cifar10-incomplete"  # ours alone: the lock is held
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        if self.archive.exists():
            _check_md5(self.archive, self.dataset_class.tgz_md5, "delete it, it will be downloaded again")
            os.link(self.archive, staging / self.archive.name)
        try:
            with _socket_timeout(20):
                self.dataset_class(str(staging), download=True)
        except (OSError, RuntimeError) as error:
            partial = staging / self.archive.name
            if partial.exists():  # came in full, or in part, but wrong
                _check_md5(partial, self.dataset_class.tgz_md5, "try again, or --data.source synthetic")
            raise UsageError(
                f"--data.source cifar10: CIFAR-10 is not under {self.root} and {self.dataset_class.url} cannot be"
                f" reached ({error}). Put {self.archive.name} into {self.root} by hand, or use --data.source synthetic"
            ) from error
        else:
            if not self.archive.exists():
                os.replace(staging / self.archive.name, self.archive)
            os.replace(staging / self.folder.name, self.folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _check_md5(path: Path, expected: str, remedy: str) -> None:
    if not path.is_file():
        raise UsageError(f"{path} is missing; {remedy}")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest() if hasattr(hashlib, "file_digest") else _md5(path)
    if found != expected:
        raise UsageError(f"{path} is damaged: its MD5 is {found}, expected {expected}; {remedy}")


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()  # Python 3.10 has no file_digest


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Bound each wait for the network: torchvision's download has no time limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# ---- a folder for each class


class FolderSource(Source):
    """Your own images: `root/train/<class>/*`, `root/test/<class>/*` and, if there is one, `root/val/<class>/*`.

    Args:
        root: The folder that holds `train` and `test`.
        image_size: Height and width that the images are brought to, in pixels: scaled to cover the square, then cropped
            at the centre.

    Raises:
        UsageError: The folder does not exist, holds no images, or fewer than two classes.
    """

    name = "folder"

    def __init__(self, root: Path, image_size: int) -> None:
        self.root = root
        self.image_size = image_size
        if not root.is_dir():
            raise UsageError(f"--data.root {root} does not exist; it should hold train/<class>/ and test/<class>/")
        for split in ("train", "test"):
            if not (root / split).is_dir():
                raise UsageError(
                    f"--data.root {root} has no folder {split}/; it should hold train/<class>/ and test/<class>/"
                )
        self._classes = sorted(entry.name for entry in os.scandir(root / "train") if _is_visible_folder(entry))
        if len(self._classes) < 2:
            raise UsageError(
                f"--data.root {root}: {root / 'train'} has {len(self._classes)} class folders; it needs two at least"
            )
        self._files: dict[str, list[tuple[Path, int]]] = {}

    def class_names(self) -> list[str]:
        """Return the names of the folders in `train`, sorted."""
        return self._classes

    def fingerprint(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        return _stat_digest(self.root, (path for split in ("train", "val", "test") for path, _ in self._list(split)))

    def num_images(self) -> dict[str, int]:
        """Return the number of image files in each split."""
        sizes = {split: len(self._list(split)) for split in ("train", "val", "test")}
        for split in ("train", "test"):
            if not sizes[split]:
                raise UsageError(f"--data.root {self.root}: no images in {self.root / split}/<class>/")
        return {split: size for split, size in sizes.items() if size}

    def read(self, split: str, images: np.ndarray, labels: np.ndarray, progress: Progress) -> None:
        """Decode a split's files on all cores."""
        files = self._list(split)
        labels[:] = [label for _, label in files]

        def decode(number: int) -> None:
            images[number] = read_image(files[number][0], self.image_size)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as pool:
            for _ in pool.map(decode, range(len(files))):
                progress(1)

    def _list(self, split: str) -> list[tuple[Path, int]]:
        if split not in self._files:
            folder = self.root / split
            extra = {e.name for e in os.scandir(folder) if _is_visible_folder(e)} if folder.is_dir() else set()
            if unknown := sorted(extra - set(self._classes)):
                raise UsageError(f"--data.root {self.root}: {folder} has the class {unknown[0]!r}, which train/ has not")
            self._files[split] = [
                (Path(parent) / name, label)
                for label, class_name in enumerate(self._classes)
                for parent, folders, names in _walk(folder / class_name)
                for name in names
                if os.path.splitext(name)[1].lower() in Image.registered_extensions() and not name.startswith(".")
            ]
        return self._files[split]


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a class's folder, links included, in an order that every machine agrees on."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        yield parent, folders, sorted(names)


def _is_visible_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def read_image(path: Path, size: int) -> np.ndarray:
    """Read an image file of any size and mode.

    Args:
        path: The file.
        size: Height and width to bring it to: scaled to cover the square, then cropped at the centre.

    Returns:
        uint8 (3, size, size), RGB.

    Raises:
        UsageError: Pillow cannot read the file.
    """
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # 16 or 32 bits a pixel; `convert` would clip them
                image = Image.fromarray(_eight_bits(image))  # noqa: PLW2901
            image = ImageOps.exif_transpose(image)  # noqa: PLW2901
            if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))  # noqa: PLW2901
            image = image.convert("RGB")  # noqa: PLW2901
            if image.size != (size, size):
                image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)  # noqa: PLW2901
            return np.asarray(image).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} cannot be read as an image ({error}); mend it or take it out of the folder") from error


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Bring grey levels of an unknown range to 0..255, by the smallest usual range that holds them."""
    levels = np.asarray(image, dtype=np.float64)
    usual = (65535,) if image.mode.startswith("I;16") else (1, 255, 65535)
    top = next((top for top in usual if levels.max() <= top), levels.max())
    return (np.clip(levels / top, 0, 1) * 255).round().astype(np.uint8)


def _stat_digest(root: Path, paths: Iterable[Path]) -> str:
    """Digest names, sizes and times of files; ctime notices a change that leaves size and mtime as they were."""
    digest = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        name = path.relative_to(root)
        digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n".encode())
    return digest.hexdigest()


# ---- generated pictures


class SyntheticSource(Source):
    """Ten classes of generated shapes and patterns, the same on every machine, drawn in about a second.

    Place, size, colours and contrast are random, so no pixel says anything by itself and a linear model fails; each
    class is its own mirror image, so that flips keep the label.

    Args:
        image_size: Height and width of the images, in pixels.
    """

    name = "synthetic"
    sizes = {"train": 6000, "test": 2000}
    classes = [
        "disc", "ring", "square", "frame", "triangle", "plus", "cross", "rows", "columns", "checkers",
    ]  # fmt: skip

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def class_names(self) -> list[str]:
        """Return the names of the shapes."""
        return self.classes

    def fingerprint(self) -> str:
        """Return the version of the drawing; raise the number when the pictures change."""
        return f"synthetic 1 {self.sizes}"

    def num_images(self) -> dict[str, int]:
        """Return the sizes of the two splits."""
        return dict(self.sizes)

    def read(self, split: str, images: np.ndarray, labels: np.ndarray, progress: Progress) -> None:
        """Draw a split."""
        random = np.random.Generator(np.random.Philox(key=0 if split == "train" else 1))
        labels[:] = np.arange(len(labels)) % len(self.classes)
        for start in range(0, len(labels), 1000):
            chunk = slice(start, start + 1000)
            images[chunk] = _draw(labels[chunk], self.image_size, random)
            progress(len(labels[chunk]))


def _draw(labels: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Draw one picture for each label; returns uint8 (n, 3, size, size)."""
    count = len(labels)
    per_image = (count, 1, 1)
    radius = random.uniform(0.28, 0.44, per_image)  # in units of the picture's height
    centre = random.uniform(-1, 1, (2, count, 1, 1)) * (0.48 - radius)
    grid = (np.arange(size) + 0.5) / size - 0.5
    y = (grid[None, :, None] - centre[0]) / radius
    x = (grid[None, None, :] - centre[1]) / radius
    distance, box = np.hypot(x, y), np.maximum(abs(x), abs(y))
    inside = box < 1
    period = random.uniform(0.5, 0.8, per_image)
    rows, columns = (y / period) % 1 < 0.5, (x / period) % 1 < 0.5
    shapes = [
        distance < 1,
        (distance < 1) & (distance > 0.6),
        box < 0.85,
        (box < 0.9) & (box > 0.55),
        (abs(x) < (y + 0.9) / 1.8) & (y < 0.9),
        ((abs(x) < 0.28) | (abs(y) < 0.28)) & inside,
        ((abs(x - y) < 0.4) | (abs(x + y) < 0.4)) & inside,
        rows & inside,
        columns & inside,
        (rows ^ columns) & inside,
    ]
    mask = np.choose(labels[:, None, None], np.broadcast_arrays(*shapes))[:, None]
    # Brighter or darker than the ground by turns: the mean picture of every class is the same grey.
    sign = np.where(random.random((count, 1, 1, 1)) < 0.5, 1, -1)
    ground = 0.5 - sign * random.uniform(0.1, 0.4, (count, 3, 1, 1))
    figure = ground + sign * random.uniform(0.35, 0.55, (count, 3, 1, 1))
    noise = random.normal(0, 0.05, (count, 3, size, size))
    return (np.clip(np.where(mask, figure, ground) + noise, 0, 1) * 255).astype(np.uint8)

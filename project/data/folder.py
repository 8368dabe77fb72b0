"""Images of your own: a folder for each class, files of any size and mode."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from project.data.sources import Progress, Source, stat_digest
from project.errors import UsageError

CACHE_MARK = ".decoded-images"  # the name of an empty file in the folder of the cache
LAYOUT = "<class>/ for each class, or train/<class>/ and, if you have them, val/<class>/ and test/<class>/"
OTHER_NAMES_OF_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}  # taken for no class


class FolderSource(Source):
    """Your own images: `root/<class>/*`, or `root/train/<class>/*` and, where they are, `root/val` and `root/test`.

    Without `root/test` a share of each class is split off for testing, chosen by the files' names: it is the same on every
    machine and for every seed, and nearly the same when images are added.

    Args:
        root: The folder that holds the classes, or `train`.
        image_size: Height and width that the images are brought to, in pixels: scaled to cover the square, then cropped
            at the centre.
        test_fraction: Share of each class that is split off for testing where there is no `root/test`: an image at least,
            where there are two.
        class_names: The classes that a trained network knows, in the order of their labels. Then `root/test/<class>/*`
            alone is read, whichever of them are there, and without a `test` folder `root/<class>/*`. None for those of
            the training images.

    Raises:
        UsageError: The folder does not exist, holds no images, or fewer than two classes.
    """

    name = "folder"
    root: Path

    def __init__(
        self, root: Path, image_size: int, test_fraction: float = 0.1, class_names: Sequence[str] | None = None
    ) -> None:
        self.root = root
        self.image_size = image_size
        self._files: dict[str, list[tuple[Path, int]]] = {}
        self._test_fraction = test_fraction
        if not root.is_dir():
            raise UsageError(f"--data.root {root} does not exist; it should hold {LAYOUT}")
        has = {split: (root / split).is_dir() for split in ("train", "val", "test")}
        if has["train"] or class_names is not None:
            for name in sorted(visible_folders(root)):
                if name.lower() in OTHER_NAMES_OF_SPLITS and name not in has:
                    raise UsageError(
                        f"--data.root {root}: {name}/ would be passed over; rename it to val/ or test/, or move it away"
                    )
        if class_names is not None:
            self.part, self._classes = "test", list(class_names)
            self._folders = {"test": root / "test" if has["test"] else root}
            return
        training = root / "train" if has["train"] else root
        self._folders = {"train": training, **{split: root / split for split in ("val", "test") if has[split]}}
        self._classes = self._classes_in(training)
        if "test" not in self._folders:
            if not test_fraction:
                raise UsageError(
                    f"--data.test_fraction {test_fraction}: {root} has no test/; give a share above 0, or test/"
                )
            self.test_is_split_off, self.part = True, f"test {test_fraction}"
            self._folders["test"] = training

    def _classes_in(self, folder: Path) -> list[str]:
        """Return the names of a folder's folders, sorted, once it is sure that they are classes."""
        names = sorted(visible_folders(folder))
        if splits := [name for name in names if name.lower() in OTHER_NAMES_OF_SPLITS and folder == self.root]:
            raise UsageError(
                f"--data.root {self.root} has no folder train/, but {', '.join(f'{name}/' for name in splits)}, which would"
                f" each be a class; it should hold {LAYOUT}"
            )
        for name in names:
            if not name.isprintable():  # as of an archive from a system with another character set
                raise UsageError(
                    f"--data.root {self.root}: the class folder {os.fsencode(name)!r} in {folder} has a name that"
                    " cannot be printed (not UTF-8, or control characters); rename it"
                )
        if len(names) < 2:
            raise UsageError(
                f"--data.root {self.root}: {folder} has {len(names)} class folders; it needs two at least: {LAYOUT}"
            )
        return names

    def class_names(self) -> list[str]:
        """Return the names of the training images' folders, sorted, or those that were given."""
        return self._classes

    def fingerprint(self) -> str:
        """Return a digest of the classes, and of the files' names, sizes and times."""
        return "\n".join(self._classes) + stat_digest(
            self.root, (path for split in self._folders for path, _ in self._list(split))
        )

    def class_counts(self) -> dict[str, list[int]]:
        """Return the number of image files of each class in each split.

        Raises:
            UsageError: There are none in `train` or `test`, or none of one class in `train`.
        """
        counts = {split: [0] * len(self._classes) for split in self._folders}
        for split in counts:
            for _, label in self._list(split):
                counts[split][label] += 1
        for split in ("train", "test"):
            if not any(counts.get(split, [1])):
                few = " to test on; a class needs two at least" if self.test_is_split_off and any(counts["train"]) else ""
                raise UsageError(f"--data.root {self.root}: no images in {self._folders[split]}/<class>/{few}")
        for count, name in zip(counts.get("train", ()), self._classes, strict=False):
            if not count:
                raise UsageError(
                    f"--data.root {self.root}: no images in {self._folders['train'] / name}/; remove the folder"
                )
        return {split: by_class for split, by_class in counts.items() if any(by_class)}

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
        if split not in self._files and self.test_is_split_off and split != "val":
            self._files["train"], self._files["test"] = self._split_off(self._find("train"))
        if split not in self._files:
            self._files[split] = self._find(split)
        return self._files[split]

    def _split_off(self, files: list[tuple[Path, int]]) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
        """Return the training files and the test files, each in the order of all."""
        test: set[Path] = set()
        by_label: list[list[Path]] = [[] for _ in self._classes]
        for path, label in files:
            by_label[label].append(path)
        for label, class_name in enumerate(self._classes):
            folder, paths = self._folders["train"] / class_name, by_label[label]
            digests = {path: hashlib.sha256(os.fsencode(path.relative_to(folder))).digest() for path in paths}
            most = max(0, len(paths) - 1)
            test.update(sorted(paths, key=digests.__getitem__)[: min(max(1, round(self._test_fraction * len(paths))), most)])
        return [file for file in files if file[0] not in test], [file for file in files if file[0] in test]

    def _find(self, split: str) -> list[tuple[Path, int]]:
        """List a split's folder: each image file with its label, in an order that every machine agrees on."""
        folder = self._folders[split]
        if unknown := sorted(visible_folders(folder) - set(self._classes)):
            known = "train/ has not" if "train" in self._folders else f"is none of {', '.join(self._classes)}"
            raise UsageError(f"--data.root {self.root}: {folder} has the class {unknown[0]!r}, which {known}")
        suffixes = tuple(Image.registered_extensions())
        return [
            (Path(parent, name), label)
            for label, class_name in enumerate(self._classes)
            for parent, names in _walk(folder / class_name, self._above(folder))
            for name in names
            if name.lower().endswith(suffixes) and not name.startswith(".")
        ]

    def _above(self, folder: Path) -> frozenset[tuple[int, int]]:
        """Return what is known of the folders from a split's up to the root's: images that a link back finds are others'."""
        folders = (folder, *folder.parents)
        return frozenset(map(_identity, (f for f in folders[: folders.index(self.root) + 1] if f.is_dir())))


def _identity(folder: Path) -> tuple[int, int]:
    about = os.stat(folder)
    return about.st_dev, about.st_ino


def _walk(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those in it, each with its files, in an order that every machine agrees on.

    Links are followed, but not back to a folder that they lie in, nor to one of `above`.
    """
    if not folder.is_dir() or (here := _identity(folder)) in above:
        return
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    yield folder, [entry.name for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_dir():
            yield from _walk(Path(entry.path), above | {here})


def visible_folders(root: Path) -> set[str]:
    """Return the names of a folder's folders that may be classes; none where it is not there."""
    return {entry.name for entry in os.scandir(root) if _is_visible_folder(entry)} if root.is_dir() else set()


def folder_of_images(root: Path) -> str | None:
    """Return a folder in `root` by which it is to be read as "folder"; None if it does not look so."""
    if not root.is_dir() or (root / "cifar-10-batches-py").is_dir():
        return "train" if (root / "train").is_dir() else None
    suffixes = tuple(Image.registered_extensions())
    folders = ((name, os.listdir(root / name)) for name in visible_folders(root))
    classes = [name for name, files in folders if any(file.lower().endswith(suffixes) for file in files)]
    return "train" if (root / "train").is_dir() else min(classes) if len(classes) > 1 else None


def _is_visible_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".") and not _is_ours(entry)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Return whether a folder holds what this template puts beside images, in data/: decoded ones, CIFAR-10."""
    return entry.name == "cifar-10-batches-py" or Path(entry.path, CACHE_MARK).exists()


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
        with Image.open(path) as file:
            if file.format == "EPS":
                raise ValueError("PostScript is a program, which Pillow would have Ghostscript run")
            image = ImageOps.exif_transpose(file)
            if image.mode[0] in "IF":  # 16 or 32 bits a pixel; `convert` would clip them
                image = Image.fromarray(_eight_bits(image))
            if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            image = image.convert("RGB")
            if image.size != (size, size):
                image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
            return np.asarray(image).transpose(2, 0, 1)
    except Exception as error:  # on broken data Pillow's plugins raise anything: struct.error, IndexError, zlib.error ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{path} cannot be read as an image ({reason}); mend it or take it out of the folder") from error


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Bring grey levels of an unknown range to 0..255, by the smallest usual range that holds them."""
    levels = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)  # where a map knows nothing: black
    usual = (65535,) if image.mode.startswith("I;16") else (1, 255, 65535)
    top = next((top for top in usual if levels.max() <= top), levels.max())
    return (np.clip(levels / top, 0, 1) * 255).round().astype(np.uint8)

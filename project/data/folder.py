"""Images of your own: a folder for each class, files of any size and mode."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from project.data.sources import Progress, Source, stat_digest
from project.errors import UsageError


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
    root: Path

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
        """Return a digest of the classes, and of the files' names, sizes and times."""
        return "\n".join(self._classes) + stat_digest(
            self.root, (path for split in ("train", "val", "test") for path, _ in self._list(split))
        )

    def class_counts(self) -> dict[str, list[int]]:
        """Return the number of image files of each class in each split.

        Raises:
            UsageError: There are none in `train` or `test`, or none of one class in `train`.
        """
        counts = {split: [0] * len(self._classes) for split in ("train", "val", "test")}
        for split in counts:
            for _, label in self._list(split):
                counts[split][label] += 1
        for split in ("train", "test"):
            if not any(counts[split]):
                raise UsageError(f"--data.root {self.root}: no images in {self.root / split}/<class>/")
        for count, name in zip(counts["train"], self._classes, strict=True):
            if not count:
                raise UsageError(f"--data.root {self.root}: no images in {self.root / 'train' / name}/; remove the folder")
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
        if split not in self._files:
            folder = self.root / split
            extra = {e.name for e in os.scandir(folder) if _is_visible_folder(e)} if folder.is_dir() else set()
            if unknown := sorted(extra - set(self._classes)):
                raise UsageError(f"--data.root {self.root}: {folder} has the class {unknown[0]!r}, which train/ has not")
            suffixes = tuple(Image.registered_extensions())
            self._files[split] = [
                (Path(parent, name), label)
                for label, class_name in enumerate(self._classes)
                for parent, _, names in _walk(folder / class_name)
                for name in names
                if name.lower().endswith(suffixes) and not name.startswith(".")
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
        with Image.open(path) as file:
            image: Image.Image = file
            if image.mode[0] in "IF":  # 16 or 32 bits a pixel; `convert` would clip them
                image = Image.fromarray(_eight_bits(image))
            image = ImageOps.exif_transpose(image)
            if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            image = image.convert("RGB")
            if image.size != (size, size):
                image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
            return np.asarray(image).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} cannot be read as an image ({error}); mend it or take it out of the folder") from error


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Bring grey levels of an unknown range to 0..255, by the smallest usual range that holds them."""
    levels = np.asarray(image, dtype=np.float64)
    usual = (65535,) if image.mode.startswith("I;16") else (1, 255, 65535)
    top = next((top for top in usual if levels.max() <= top), levels.max())
    return (np.clip(levels / top, 0, 1) * 255).round().astype(np.uint8)

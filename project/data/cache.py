"""Decoded images as memory-mapped files: decoded once per machine, shared by all its processes, never half-written."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from project.data.folder import CACHE_MARK
from project.data.sources import Progress, Source
from project.errors import UsageError


@dataclass(frozen=True)
class Manifest:
    """What a cache holds.

    Attributes:
        source: The source's name.
        class_names: In the order of the labels.
        image_size: Height and width in pixels.
        num_images: Images in each split.
        mean: Mean of the training pixels by channel, in 0..1.
        std: Their standard deviation.
        digest: SHA-256 of all images and labels.
    """

    source: str
    class_names: list[str]
    image_size: int
    num_images: dict[str, int]
    mean: list[float]
    std: list[float]
    digest: str


@dataclass(frozen=True)
class Split:
    """One split's images, uint8 (n, 3, S, S), and labels, int64 (n,), mapped from the cache."""

    images: Tensor
    labels: Tensor


class ImageCache:
    """The decoded images of one source in one folder, named by the source's fingerprint.

    Args:
        source: Where the images come from.
        folder: Holds the caches of all sources.
    """

    def __init__(self, source: Source, folder: Path) -> None:
        self.source = source
        self.folder = folder
        part = [source.part] if source.part else []
        self.family = f"{source.name}-{_short(str(source.root and source.root.resolve()), str(source.image_size), *part)}"
        self.path = folder / f"{self.family}-{_short(source.fingerprint())}"

    def build(self, quiet: bool = False) -> None:
        """Decode the images, unless a whole cache is there; one process at a time.

        Args:
            quiet: Whether to say nothing of it.

        Raises:
            UsageError: The folder cannot be written, or an image cannot be read.
        """
        if self._is_whole():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / CACHE_MARK).touch()  # it is no class of images, if it lies among them
            with FileLock(self.folder / f".{self.family}.lock"):
                if not self._is_whole():
                    self._write(quiet)
        except OSError as error:
            raise UsageError(f"--data.cache_dir {self.folder} cannot be written ({error}); name another folder") from error

    def open(self) -> tuple[Manifest, dict[str, Split]]:
        """Map the cache into memory; pages are shared by all processes of the machine."""
        manifest = Manifest(**json.loads((self.path / "manifest.json").read_text()))
        splits = {split: Split(self._map(f"{split}_images"), self._map(f"{split}_labels")) for split in manifest.num_images}
        return manifest, splits

    def _map(self, name: str) -> Tensor:
        # "c": copy on write, which shares the pages as "r" does, and torch does not warn that it cannot write.
        return torch.from_numpy(np.load(self.path / f"{name}.npy", mmap_mode="c"))

    def _is_whole(self) -> bool:
        try:
            manifest, splits = self.open()  # numpy refuses to map a file that is shorter than its header says
        except (OSError, ValueError, TypeError):
            return False
        return all(len(splits[split].labels) == count for split, count in manifest.num_images.items())

    def _write(self, quiet: bool) -> None:
        staging = self.folder / f".{self.family}.incomplete"  # ours alone: the lock is held
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            manifest = self._decode(staging, quiet)
            (staging / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2))
            for file in staging.iterdir():
                _sync(file)
            for stale in self.folder.glob(f"{self.family}-*"):  # of images that have changed since, or damaged
                shutil.rmtree(stale)
            os.replace(staging, self.path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _decode(self, staging: Path, quiet: bool) -> Manifest:
        sizes, side = self.source.num_images(), self.source.image_size
        digest = hashlib.sha256()
        histogram = np.zeros((3, 256), dtype=np.int64)
        with _progress(f"preparing {self.source.name} images", sum(sizes.values()), quiet) as progress:
            for split, count in sizes.items():
                shape = (count, 3, side, side)
                images = np.lib.format.open_memmap(staging / f"{split}_images.npy", "w+", np.uint8, shape)
                labels = np.lib.format.open_memmap(staging / f"{split}_labels.npy", "w+", np.int64, (count,))
                self.source.read(split, images, labels, progress)
                digest.update(np.ascontiguousarray(images).data)
                digest.update(np.ascontiguousarray(labels).data)
                if split == "train":
                    for start in range(0, count, 4096):  # in pieces, so that memory stays small whatever the set
                        for channel in range(3):
                            piece = images[start : start + 4096, channel].reshape(-1)
                            histogram[channel] += np.bincount(piece, minlength=256)
                images.flush()
                labels.flush()
        levels = np.arange(256) / 255
        share = histogram / np.maximum(histogram.sum(axis=1, keepdims=True), 1)  # 0 where there are no training images
        mean = share @ levels
        std = np.sqrt(np.maximum(share @ levels**2 - mean**2, 0))
        std[std == 0] = 1  # a channel of one value, as in some microscopes' images
        return Manifest(
            source=self.source.name,
            class_names=self.source.class_names(),
            image_size=side,
            num_images=sizes,
            mean=mean.tolist(),
            std=std.tolist(),
            digest=digest.hexdigest(),
        )


def _short(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _progress(what: str, total: int, quiet: bool) -> Iterator[Progress]:
    """Show a bar on a terminal, one line elsewhere."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not (console.is_terminal or quiet):
        print(f"{what}: {total:,}, once per machine", file=sys.stderr, flush=True)
    if quiet or not console.is_terminal:  # a bar that is disabled may print an empty line all the same
        yield lambda done: None
        return
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)

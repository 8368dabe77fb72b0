"""Where images come from: what every source must offer, and CIFAR-10. `folder.py` and `synthetic.py` are the others."""

import hashlib
import os
import shutil
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import numpy as np
from filelock import FileLock

from project.errors import UsageError

SECONDS_BEFORE_A_WORD = 2.0  # of a download: one that fails at once has its own line
Progress = Callable[[int], None]  # called with the number of images done since the last call


class Source(ABC):
    """A data set that can be decoded into arrays.

    One of your own is a subclass, made as `YourSource(root, image_size)` and named by
    `--data.source project.data.your_module.YourSource`; the README's "Make it yours" has an example.

    Attributes:
        name: What `--data.source` calls it.
        root: The folder it lies in; None where it has none.
        image_size: Height and width of the decoded images, in pixels.
        part: Which part of it is read; empty for all.
        quiet: Whether it says nothing of a download.
        test_is_split_off: Whether its test images are a part of what would else be training images.
    """

    name: str
    root: Path | None = None
    part: str = ""
    quiet = False
    test_is_split_off = False
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
    def class_counts(self) -> dict[str, list[int]]:
        """Return the number of images of each class in each split: "train", "test", and "val" where the source has one."""

    def num_images(self) -> dict[str, int]:
        """Return the number of images in each split."""
        return {split: sum(counts) for split, counts in self.class_counts().items()}

    @abstractmethod
    def read(self, split: str, images: np.ndarray, labels: np.ndarray, progress: Progress) -> None:
        """Decode a split into images, uint8 (n, 3, S, S), and labels, int64 (n,)."""


def stat_digest(root: Path, paths: Iterable[Path]) -> str:
    """Digest names, sizes and times of files; ctime notices a change that leaves size and mtime as they were."""
    digest, prefix = hashlib.sha256(), os.fspath(root)
    for path in paths:
        stat = os.stat(path)
        name = os.fspath(path)[len(prefix) :]
        figures = f" {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n"
        digest.update(os.fsencode(name) + figures.encode())  # a name need not be UTF-8
    return digest.hexdigest()


class Cifar10Source(Source):
    """CIFAR-10 as torchvision downloads, checks and reads it; a copy under `root` is used as it is.

    Args:
        root: The folder that holds, or will hold, `cifar-10-batches-py`.
    """

    name = "cifar10"
    root: Path
    image_size = 32

    def __init__(self, root: Path) -> None:
        from torchvision.datasets import CIFAR10  # here, because it takes a second and only this source needs it

        self.dataset_class = CIFAR10
        self.root = root
        self.folder: Path = root / CIFAR10.base_folder
        self.archive: Path = root / CIFAR10.filename

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
        if not self.is_there():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                with FileLock(self.root / ".cifar10.lock"):
                    if not self.is_there():
                        self._fetch()
            except OSError as error:
                raise UsageError(f"--data.root {self.root} cannot be written ({error}); name another folder") from error
        self._check_files()

    def _check_files(self) -> None:
        """Compare every file's MD5: they are pickles, and could run code."""
        for name, expected in self._checksums():
            _check_md5(self.folder / name, expected, f"delete {self.folder}, it will be made again")

    def class_names(self) -> list[str]:
        """Return CIFAR-10's ten names."""
        return list(self._dataset("test").classes)

    def fingerprint(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        return stat_digest(self.folder, (self.folder / name for name, _ in self._checksums()))

    def class_counts(self) -> dict[str, list[int]]:
        """Count the labels of the two halves, by reading them; where they are not there yet, return what is known."""
        if not self.is_there():
            return {"train": [5000] * 10, "test": [1000] * 10}
        return {split: np.bincount(self._dataset(split).targets).tolist() for split in ("train", "test")}

    def read(self, split: str, images: np.ndarray, labels: np.ndarray, progress: Progress) -> None:
        """Copy a half out of torchvision's data set."""
        dataset = self._dataset(split)
        images[:] = dataset.data.transpose(0, 3, 1, 2)
        labels[:] = dataset.targets
        progress(len(labels))

    def _dataset(self, split: str):  # type: ignore[no-untyped-def]
        try:
            return self.dataset_class(str(self.root), train=split == "train")  # compares their MD5 before it unpickles them
        except RuntimeError:
            self._check_files()
            raise

    def _checksums(self) -> list[tuple[str, str]]:
        meta = self.dataset_class.meta
        files = [*self.dataset_class.train_list, *self.dataset_class.test_list, [meta["filename"], meta["md5"]]]
        return [(name, md5) for name, md5 in files]

    def _fetch(self) -> None:
        from torchvision.datasets.utils import extract_archive

        staging = self.root / ".cifar10-incomplete"  # ours alone: the lock is held
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            if not self.archive.exists():
                self._download(staging)
            _check_md5(self.archive, self.dataset_class.tgz_md5, "delete it, it will be downloaded again")
            extract_archive(str(self.archive), str(staging))
            os.replace(staging / self.folder.name, self.folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _download(self, staging: Path) -> None:
        from torchvision.datasets.utils import download_url

        url, partial = self.dataset_class.url, staging / self.archive.name
        said = threading.Timer(SECONDS_BEFORE_A_WORD, self._say, [f"downloading {url} into {self.root}/"])
        said.start()
        try:
            with _socket_timeout(20):
                download_url(url, str(staging), self.archive.name, self.dataset_class.tgz_md5)
        except (OSError, RuntimeError, HTTPException) as error:
            if partial.exists():  # came in part, or whole but wrong
                _check_md5(partial, self.dataset_class.tgz_md5, "try again, or --data.source synthetic")
            raise UsageError(
                f"--data.source cifar10: CIFAR-10 is not under {self.root} and {url} cannot be reached ({error})."
                f" Put {self.archive.name} into {self.root} by hand, or use --data.source synthetic"
            ) from error
        finally:
            said.cancel()
        os.replace(partial, self.archive)

    def _say(self, text: str) -> None:
        if not (self.quiet or sys.stderr.isatty()):  # on a terminal torchvision shows a bar
            print(text, file=sys.stderr, flush=True)


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

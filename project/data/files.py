"""Image files of any kind, given by name: found, decoded ahead of the network, batched in their order."""

import os
import stat
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from PIL import UnidentifiedImageError
from torch import Tensor

from project.data.batches import BLANK, EvaluationSampler
from project.data.folder import read_image
from project.data.normalize import Normalization
from project.errors import UsageError

BATCHES_AHEAD = 2  # that are decoded while the network computes
Batch = tuple[Tensor, Tensor]  # images, uint8 (B, 3, S, S), and their positions in `files`, int64 (B,); BLANK for none


class ImageFiles(LightningDataModule):
    """The images of files and folders, for `trainer.predict`. Each meets the same batch on any number of processes.

    Args:
        given: Files, and folders with everything in them.
        image_size: Height and width in pixels that the images are brought to.
        mean: Of red, green and blue, in 0..1; pixels / 255 have it subtracted.
        std: The same, and are divided by it.
        batch_size: Images at a time, on each device.

    Attributes:
        files: Every file that was found, in order; there once `setup` has run.
        hidden: Names with a dot in front, of files and folders, which were left out.
        unread: Positions in `files`, and why; those that this rank could not read.
    """

    def __init__(
        self, given: Sequence[str], image_size: int, mean: Sequence[float], std: Sequence[float], batch_size: int
    ) -> None:
        super().__init__()
        self.given, self.image_size, self.batch_size = given, image_size, batch_size
        self._normalize = Normalization(mean, std)
        self.files, self.hidden = list[str](), list[str]()
        self.unread: list[tuple[int, str]] = []

    def setup(self, stage: str | None = None) -> None:
        """Find the files, on rank 0: other processes may see others, if some come or go meanwhile."""
        assert self.trainer is not None
        found = find_files(self.given) if self.trainer.is_global_zero else ([], [])
        self.files, self.hidden = self.trainer.strategy.broadcast(found)
        # Oddities of files that can be read all the same, without their names; in threads no warning can be caught.
        warnings.filterwarnings("ignore", module="PIL")

    def predict_dataloader(self) -> "FileBatches":
        """Return this rank's batches; every rank has as many."""
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        positions = torch.arange(len(self.files))
        sampler = EvaluationSampler(self.files, positions, self.batch_size, world_size, rank)  # type: ignore[arg-type]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.unread = []
        return FileBatches(self, sampler, max(1, cores * self.trainer.num_nodes // world_size))

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise a batch on its device."""
        return self._normalize(batch[0]), batch[1]


class FileBatches:
    """One rank's batches, decoded by threads: Pillow leaves the interpreter to others meanwhile.

    It is no DataLoader: in one, Lightning's `predict` would replace the sampler.
    """

    def __init__(self, data: ImageFiles, batches: EvaluationSampler, threads: int) -> None:
        self.data, self.batches, self.threads = data, batches, threads

    def __len__(self) -> int:
        """Return their number."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yield them; no more than BATCHES_AHEAD wait in memory."""
        pool = ThreadPoolExecutor(self.threads)
        waiting: deque[tuple[Tensor, list[Future[np.ndarray | str]]]] = deque()
        try:
            for _, positions in self.batches:
                files = [self.data.files[position] for position in positions.tolist() if position != BLANK]
                waiting.append((positions, [pool.submit(image_or_reason, file, self.data.image_size) for file in files]))
                if len(waiting) > BATCHES_AHEAD:
                    yield self._batch(*waiting.popleft())
            while waiting:
                yield self._batch(*waiting.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _batch(self, positions: Tensor, decoded: list[Any]) -> Batch:
        images = np.zeros((len(positions), 3, self.data.image_size, self.data.image_size), np.uint8)
        positions = positions.clone()
        for place, future in enumerate(decoded):  # blanks come last
            if isinstance(image := future.result(), str):
                self.data.unread.append((int(positions[place]), image))
                positions[place] = BLANK
            else:
                images[place] = image
        return torch.from_numpy(images), positions


def find_files(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is given and not a folder, and what lies in the folders, each sorted; and what there is hidden.

    Links are followed, but not back to a folder that they lie in. A folder that cannot be looked into, or is given and
    has no files, stands for itself.
    """
    files, hidden = list[str](), list[str]()
    for argument in given:
        before = len(files)
        ahead: list[tuple[str, frozenset[tuple[int, int]]]] = [(argument, frozenset())]
        while ahead:
            path, above = ahead.pop()
            try:
                names = sorted(os.listdir(path), reverse=True)
                about = os.stat(path)
            except OSError:  # no folder, mostly
                files.append(path)
                continue
            if (here := (about.st_dev, about.st_ino)) not in above:
                ahead += [(os.path.join(path, name), above | {here}) for name in names if not name.startswith(".")]
                hidden += [os.path.join(path, name) for name in reversed(names) if name.startswith(".")]
        if len(files) == before:
            files.append(argument)
    return files, hidden


def image_or_reason(path: str, size: int) -> np.ndarray | str:
    """Return a file's image, uint8 (3, size, size), or why there is none. Pipes and devices are not opened."""
    try:
        about = os.stat(path)
        if stat.S_ISDIR(about.st_mode):
            os.listdir(path)
            return "a folder with no files to label"
        if not stat.S_ISREG(about.st_mode):
            return "not a file but a pipe, a socket or a device"
        return read_image(Path(path), size) if about.st_size else "empty"
    except OSError as error:
        is_link = isinstance(error, FileNotFoundError) and os.path.islink(path)
        return "a link to what is not there" if is_link else error.strerror or str(error)
    except UsageError as error:
        cause = error.__cause__
        if isinstance(cause, UnidentifiedImageError):
            return "not an image, or of a kind that Pillow does not know"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        return f"cannot be decoded ({' '.join(str(cause).split()) or type(cause).__name__})"

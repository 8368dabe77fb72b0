"""Which images make up each batch, on each rank: the samplers, and the data set that returns whole batches."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from project.data.augment import Augmentation, generator

IGNORE_INDEX = -100  # the label of the blank images that fill up an evaluation batch; torch's default for cross_entropy
ENDING = {signal.SIGTERM, signal.SIGINT}
BLANK = -1  # the position of such an image


class BatchIndex(NamedTuple):
    """One rank's share of one batch. The epoch travels with it, so that worker processes need not be told."""

    epoch: int
    positions: Tensor  # int64 (B,)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a worker as plain bytes. Of a tensor torch sends a handle, for which the worker has to ask back."""
        return _batch_index, (self.epoch, self.positions.numpy())


def _batch_index(epoch: int, positions: np.ndarray) -> BatchIndex:
    return BatchIndex(epoch, torch.from_numpy(positions))


class ImageBatches(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches of images: `dataset[BatchIndex(epoch, positions)]`, with no work in Python for a single image.

    Args:
        images: uint8 (N, 3, H, W), usually memory-mapped.
        labels: int64 (N,).
        augment: Applied to each batch, or None.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: Augmentation | None = None) -> None:
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: BatchIndex) -> tuple[Tensor, Tensor]:
        """Return images, uint8 (B, 3, H, W), and labels, int64 (B,); at BLANK positions black and IGNORE_INDEX."""
        epoch, positions = index
        blank = positions == BLANK
        if has_blanks := bool(blank.any()):
            positions = positions.where(~blank, 0)
        images = self.images.index_select(0, positions)  # image by image; `images[positions]` copies pixel by pixel
        labels = self.labels.index_select(0, positions)
        if has_blanks:
            images[blank] = 0
            labels[blank] = IGNORE_INDEX
        if self.augment is not None:
            images = self.augment(images, positions, epoch)
        return images, labels


# Both samplers are DistributedSamplers so that Lightning, which looks for one, leaves them alone with any Trainer.


class GlobalBatchSampler(DistributedSampler[BatchIndex]):
    """Training batches that do not depend on the number of processes: rank r gets `[r::N]` of each global batch.

    The order is a permutation that depends on (seed, epoch) alone; images that do not fill a last global batch are
    left out, other ones in every epoch.

    Args:
        dataset: What the batches are taken from.
        positions: int64 (n,), the images to use, as positions in the data set.
        global_batch_size: Images per training step, over all ranks.
        num_replicas: Number of ranks; must divide `global_batch_size`.
        rank: This process's number.
        seed: Seed of the run.
        num_done: Asked when an epoch's first batch is due: how many of its global batches were trained before, which
            are then left out. It is how a run goes on inside an epoch, on any number of ranks.
    """

    def __init__(
        self,
        dataset: ImageBatches,
        positions: Tensor,
        global_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        num_done: Callable[[], int] = int,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, seed=seed)
        assert global_batch_size % num_replicas == 0
        self.positions = positions
        self.global_batch_size = global_batch_size
        self.num_done = num_done

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.positions) // self.global_batch_size

    def __iter__(self) -> Iterator[BatchIndex]:
        """Yield this rank's share of each global batch of the epoch that `set_epoch` named."""
        # step 7: Lightning calls set_epoch with its counter before every epoch; the order follows from it
        order = self.positions[torch.randperm(len(self.positions), generator=generator(self.seed, self.epoch, 0))]
        for global_batch in order.split(self.global_batch_size)[self.num_done() : len(self)]:
            # step 8: the global batch stays what the flag says; each rank takes its part of it
            yield BatchIndex(self.epoch, global_batch[self.rank :: self.num_replicas])


class EvaluationSampler(DistributedSampler[BatchIndex]):
    """Every image once, in order, in batches that are the same on any number of processes.

    Batch b goes to rank `b % N`. All batches have the same shape and all ranks the same number of them: what is short
    is filled up with BLANK. So each image meets the same neighbours in the same arithmetic wherever it is evaluated.

    Args:
        dataset: What the batches are taken from.
        positions: int64 (n,), the images to use, as positions in the data set.
        batch_size: Images per batch, on one rank; never more than n.
        num_replicas: Number of ranks.
        rank: This process's number.
    """

    def __init__(
        self, dataset: ImageBatches, positions: Tensor, batch_size: int, num_replicas: int = 1, rank: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False)
        self.positions = positions
        self.batch_size = min(batch_size, len(positions))

    def __len__(self) -> int:
        """Return the number of batches on each rank."""
        return -(-len(self.positions) // (self.batch_size * self.num_replicas))

    def __iter__(self) -> Iterator[BatchIndex]:
        """Yield this rank's batches."""
        padded = torch.full((len(self) * self.num_replicas * self.batch_size,), BLANK)
        padded[: len(self.positions)] = self.positions
        for batch in padded.split(self.batch_size)[self.rank :: self.num_replicas]:
            yield BatchIndex(0, batch)


def follow_the_parent(worker: int) -> None:
    """Have a worker end when its parent says so, not by what is sent to the whole process group or job, and silently.

    A worker that ignored SIGTERM altogether would be waited for forever by a parent that ends with its loader alive. In a
    worker that was spawned, not forked, a thread that a library has started on import may still take the signal and end it.
    """
    _say_nothing_of_a_lost_parent()
    if not hasattr(signal, "sigwaitinfo"):  # macOS, which does not tell who sent it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # so that none is delivered but to the thread that asks
    parent = multiprocessing.parent_process()
    assert parent is not None

    def listen() -> None:
        while signal.sigwaitinfo(ENDING).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=listen, daemon=True, name="signals").start()


def _say_nothing_of_a_lost_parent() -> None:
    """Leave the last word to whoever knows why the parent ended: a launcher, or rank 0.

    The thread by which a worker hands its memory over prints a traceback where the parent ends while it asks.
    """
    parent, show = os.getppid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end = time.monotonic() + 5  # a process closes its connections some time before it is gone
        while issubclass(kind, EOFError | ConnectionError) and time.monotonic() < end:
            if os.getppid() != parent:
                return
            time.sleep(0.02)
        show(kind, error, trace)

    sys.excepthook = hook


class BatchLoader(DataLoader[tuple[Tensor, Tensor]]):
    """A DataLoader that asks its sampler, and starts its workers, only when the first batch is due.

    Lightning makes the iterator while it is still setting the run up, before a checkpoint's progress is known; workers
    that fetch ahead would fetch the wrong epoch's images.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches; without workers straight from the data set, past DataLoader's bookkeeping."""
        if self.num_workers or self.pin_memory:
            yield from super().__iter__()
        else:
            yield from map(self.dataset.__getitem__, self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what comes next follows from the trainer's progress. Lightning asks for this."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, for the same reason."""

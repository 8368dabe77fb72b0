"""What each rank sees: the same images in the same global batches, whatever the number of ranks."""

import os
import pickle
import signal
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from torch import Tensor

from project.data.augment import Augmentation
from project.data.batches import BLANK, IGNORE_INDEX, BatchIndex, EvaluationSampler, GlobalBatchSampler, ImageBatches

ROOT = Path(__file__).parent.parent


def dataset(count: int, augment: Augmentation | None = None) -> ImageBatches:
    images = torch.randint(256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageBatches(images, torch.arange(count) % 10, augment)


def batches(positions: Tensor, size: int, ranks: int, epoch: int = 0, seed: int = 0) -> list[list[Tensor]]:
    """For each rank, its batches of an epoch."""
    result = []
    for rank in range(ranks):
        sampler = GlobalBatchSampler(dataset(200), positions, size, ranks, rank, seed)
        sampler.set_epoch(epoch)
        result.append([index.positions for index in sampler])
        assert len(result[-1]) == len(sampler)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_each_global_batch(ranks: int) -> None:
    positions = torch.arange(50, 180)
    alone = batches(positions, 16, 1)[0]
    shared = batches(positions, 16, ranks)
    assert len(alone) == 130 // 16
    for step, whole in enumerate(alone):
        parts = [rank[step] for rank in shared]
        assert {len(part) for part in parts} == {16 // ranks}
        assert torch.equal(torch.stack(parts, dim=1).flatten(), whole)  # rank r has [r::N]


def test_an_epoch_repeats_no_image_and_uses_only_its_own() -> None:
    positions = torch.arange(50, 180)
    seen = torch.cat(batches(positions, 16, 1)[0])
    assert len(seen.unique()) == len(seen) == 128
    assert set(seen.tolist()) < set(positions.tolist())


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else() -> None:
    positions = torch.arange(64)
    first = torch.cat(batches(positions, 16, 1)[0])
    assert torch.equal(first, torch.cat(batches(positions, 16, 1)[0]))
    assert not torch.equal(first, torch.cat(batches(positions, 16, 1, epoch=1)[0]))
    assert not torch.equal(first, torch.cat(batches(positions, 16, 1, seed=1)[0]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 101])
def test_evaluation_counts_every_image_once(ranks: int, count: int) -> None:
    per_rank = [list(EvaluationSampler(dataset(101), torch.arange(count), 16, ranks, rank)) for rank in range(ranks)]
    assert len({len(part) for part in per_rank}) == 1
    assert {len(index.positions) for part in per_rank for index in part} == {min(16, count)}
    seen = torch.cat([index.positions for part in per_rank for index in part])
    assert sorted(seen[seen != BLANK].tolist()) == list(range(count))


def test_blank_images_are_black_and_ignored() -> None:
    images, labels = dataset(10)[BatchIndex(0, torch.tensor([3, BLANK]))]
    assert labels.tolist() == [3, IGNORE_INDEX]
    assert images[0].any()
    assert not images[1].any()


def test_reading_a_blank_does_not_change_the_images() -> None:
    data = dataset(10)
    before = data.images.clone()
    data[BatchIndex(0, torch.tensor([BLANK, 9]))]
    assert torch.equal(data.images, before)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="macOS does not tell who sent a signal")
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_outlive_sigterm_from_elsewhere_and_end_with_their_parent(start: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # their threads would take the signals
    command = [sys.executable, str(ROOT / "tests/workers.py"), start]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "ready\n"
            workers = [int(text) for text in parent.stdout.readline().split()]
            assert len(workers) == 2
            for worker in workers:
                os.kill(worker, signal.SIGTERM)  # as Slurm sends it to every process of a job
                os.kill(worker, signal.SIGINT)
            output, _ = parent.communicate("\n", timeout=30)
            assert output == "11\n"
            assert parent.returncode == 0
        finally:
            parent.kill()


@pytest.mark.parametrize("start", ["fork", "spawn"])  # torch's own watch over its workers knows no forkserver
def test_a_worker_whose_parent_was_killed_has_nothing_to_say(start: str) -> None:
    """Else its traceback would stand below what the parent's launcher, or rank 0, has said last."""
    command = [sys.executable, str(ROOT / "tests/workers.py"), start, "dies"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, check=False, env=environment, stderr=PIPE, text=True, timeout=60)
    assert result.returncode == 1
    assert "Error" not in result.stderr


def test_a_worker_is_told_its_batch_without_a_connection_to_its_parent() -> None:
    """torch hands tensors over by a connection of their own, which breaks, with a traceback, where the parent is killed."""
    index = BatchIndex(3, torch.arange(5))
    sent = pickle.loads(ForkingPickler.dumps(index))
    assert b"rebuild_storage" not in bytes(ForkingPickler.dumps(index))
    assert isinstance(sent, BatchIndex)
    assert sent.epoch == 3
    assert torch.equal(sent.positions, index.positions)

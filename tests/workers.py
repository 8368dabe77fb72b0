"""A program with a loader's workers: `workers.py fork|spawn|forkserver [dies]`.

It ends while they still wait for the next batch; with `dies`, without a word, while it takes a batch from one of them.
"""

import multiprocessing
import os
import sys
from multiprocessing import resource_sharer
from multiprocessing.connection import Client
from typing import Any

import torch

from project.data.batches import BatchLoader, GlobalBatchSampler, ImageBatches, follow_the_parent


def die_asking(ident: tuple[Any, int]) -> None:
    """Instead of asking a worker for the memory of its batch: connect with it, and be gone."""
    Client(ident[0], authkey=multiprocessing.current_process().authkey)
    os._exit(1)


if __name__ == "__main__":
    dataset = ImageBatches(torch.zeros(64, 3, 8, 8, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64))
    loader = BatchLoader(
        dataset,
        sampler=GlobalBatchSampler(dataset, torch.arange(64), 4),
        batch_size=None,
        num_workers=2,
        worker_init_fn=follow_the_parent,
        persistent_workers=True,
        multiprocessing_context=sys.argv[1],
    )
    batches = iter(loader)
    for _ in range(2):  # one of each worker
        next(batches)
    if "dies" in sys.argv:
        resource_sharer._resource_sharer.get_connection = die_asking  # type: ignore[attr-defined]
        next(batches)
    print("ready", flush=True)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()
    print(2 + len(list(zip(range(9), batches, strict=False))), flush=True)  # all workers still answer

"""A program that ends while its loader's workers still wait for the next batch: `workers.py fork|spawn|forkserver`."""

import multiprocessing
import sys

import torch

from project.data.batches import BatchLoader, GlobalBatchSampler, ImageBatches, leave_signals_to_the_parent

if __name__ == "__main__":
    dataset = ImageBatches(torch.zeros(64, 3, 8, 8, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64))
    loader = BatchLoader(
        dataset,
        sampler=GlobalBatchSampler(dataset, torch.arange(64), 4),
        batch_size=None,
        num_workers=2,
        worker_init_fn=leave_signals_to_the_parent,
        persistent_workers=True,
        multiprocessing_context=sys.argv[1],
    )
    batches = iter(loader)
    for _ in range(2):  # one of each worker
        next(batches)
    print("ready", flush=True)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    sys.stdin.readline()
    print(2 + len(list(zip(range(9), batches, strict=False))), flush=True)  # all workers still answer

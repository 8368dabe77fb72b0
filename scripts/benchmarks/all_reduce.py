"""How long gloo takes to add up tensors over processes: `torchrun --nproc_per_node=2 all_reduce.py --bytes 4 1000000`."""

import argparse
import statistics
import time

import torch
import torch.distributed as dist


def main() -> None:
    """Print, on rank 0, a line for each size: bytes and the median of the milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    parser.add_argument("--times", type=int, default=50)
    flags = parser.parse_args()
    dist.init_process_group("gloo")
    for size in flags.bytes:
        tensor, seconds = torch.zeros(max(1, size // 4)), []
        for _ in range(flags.times + 3):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"{size} bytes {1e3 * statistics.median(seconds[3:]):.4f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

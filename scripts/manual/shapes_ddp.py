"""P6, what DistributedDataParallel (DDP) does to a batch: as shapes_dp.py, with each process printing its own share.

    torchrun --nproc_per_node=2 scripts/manual/shapes_ddp.py

Two processes: 30 = 15 + 15. Nothing splits inside the model: each process has taken its share before. Outputs stay where
they are; only gradients would meet. The template: `python scripts/train.py --strategy ddp --devices 2 --explain`.
"""

import os

import torch
import torch.distributed as dist
from command_line import make_parser, stop
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

INPUT_SIZE, OUTPUT_SIZE, BATCH_SIZE, DATA_SIZE = 5, 2, 30, 90


class Model(nn.Module):
    """Print what one replica sees."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(INPUT_SIZE, OUTPUT_SIZE)

    def forward(self, vectors):
        """Map vectors (B, 5) to (B, 2)."""
        output = self.fc(vectors)
        rank, shapes = dist.get_rank(), f"input {list(vectors.shape)} output {list(output.shape)}"
        print(f"rank {rank} In model: {shapes} on {vectors.device}\n", end="")  # one write: lines of two ranks do not mix
        return output


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--local-rank", help="torch.distributed.launch gives it; LOCAL_RANK always says it (mistake 4)")
    parser.parse_args()
    if "RANK" not in os.environ:
        stop("shapes_ddp.py needs a launcher: torchrun --nproc_per_node=2 scripts/manual/shapes_ddp.py")
    # step 1: torchrun has started this program once for each device, and tells each its place
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    on_gpu = torch.cuda.is_available()  # step 3: check the accelerator; this program runs on the CPU too
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # step 5: its own GPU on this machine; `rank` counts over all (mistake 3)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)  # step 4: process group

    torch.manual_seed(0)  # all processes draw the same vectors, on the CPU: one data set, which they share out (mistake 8)
    vectors = torch.randn(DATA_SIZE, INPUT_SIZE)
    sampler = DistributedSampler(vectors, world_size, rank)  # step 6: a share of the data for each, no `shuffle=` beside it
    sampler.set_epoch(0)  # step 7: the order of this epoch
    if BATCH_SIZE % world_size:
        stop(f"a batch of {BATCH_SIZE} cannot be shared equally by {world_size} processes")
    # step 8: all processes together take 30 (mistake 9)
    loader = DataLoader(vectors, BATCH_SIZE // world_size, sampler=sampler)

    model = Model()
    model.to(device)  # step 9: to this process's device at once, not to GPU 0 first (mistake 5)
    model = DistributedDataParallel(model, device_ids=[local_rank] if on_gpu else None)  # step 10: wrap
    for batch in loader:
        batch = batch.to(device)  # step 11: the batch to the device
        output = model(batch)
        print(f"rank {rank} Outside: input {list(batch.shape)} output {list(output.shape)}\n", end="")
    dist.destroy_process_group()  # step 16: clean up


if __name__ == "__main__":
    main()

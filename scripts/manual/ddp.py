"""P4, training in a process per device (DDP) by hand: plain PyTorch, all that Lightning would do for us written out.

    torchrun --nproc_per_node=2 scripts/manual/ddp.py        or: python -m torch.distributed.launch --nproc_per_node=2 ...

The template: `python scripts/train.py --config configs/manual.yaml --strategy ddp --devices 2`. Numbers: see the README.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the `project` of this clone
# step 2: CUDA_VISIBLE_DEVICES=0,2 torchrun ... chooses GPUs; after torch is imported it may come too late (mistake 2)

import torch
import torch.distributed as dist
from command_line import make_parser, run, stop
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from project.data.batches import EvaluationSampler, GlobalBatchSampler
from project.data.datamodule import ImageDataModule
from project.model.networks import ConvNet


@torch.no_grad()
def evaluate(model, loader, data, device):
    model.eval()  # the articles promise a validation and have none (mistake 10)
    counts = torch.zeros(2, device=device)  # correct, all
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        guesses = model(data.normalize_images(images)).argmax(dim=1)
        counts += torch.stack([(guesses == labels).sum(), (labels >= 0).sum()])  # a blank image's label is negative
    dist.all_reduce(counts)  # each process has counted its share
    return (counts[0] / counts[1]).item(), int(counts[1])


def main():
    parser = make_parser(__doc__, weights="logs/manual/ddp")  # a folder that all machines share
    parser.add_argument("--local-rank", help="torch.distributed.launch gives it; LOCAL_RANK always says it (mistake 4)")
    flags = parser.parse_args()
    if "RANK" not in os.environ:
        stop("ddp.py needs a launcher: torchrun --nproc_per_node=2 scripts/manual/ddp.py")
    # step 1: torchrun has started this program once for each device, and tells each its place
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    on_gpu = torch.cuda.is_available()  # step 3: check the accelerator; this program runs on the CPU too
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # step 5: its own GPU on this machine; `rank` counts over all (mistake 3)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)  # step 4: process group
    # step 8: a part of the batch for each; a whole one would be another training run for each N (mistake 9)
    if flags.batch_size % world_size:
        stop(f"--batch_size {flags.batch_size} must be a multiple of {world_size}, the number of processes")
    print(f"rank {rank} on {device}: {flags.batch_size // world_size} of {flags.batch_size} images a step\n", end="")

    data = ImageDataModule(flags.source, flags.root, flags.batch_size, shift=0, flip=False, normalize=False)
    data.prepare_data()  # one process at a time; what the first has made the others find
    data.setup()
    # step 6: a share of the images for each; these are DistributedSamplers
    train_sampler = GlobalBatchSampler(data.train_batches, data.train_positions, flags.batch_size, world_size, rank)
    val_sampler = EvaluationSampler(data.val_batches, data.val_positions, 500, world_size, rank)
    test_sampler = EvaluationSampler(data.test_batches, data.test_positions, 500, world_size, rank)
    train, val, test = (DataLoader(s.dataset, None, sampler=s) for s in (train_sampler, val_sampler, test_sampler))

    torch.manual_seed(0)
    model = ConvNet(flags.channels, flags.hidden, data.num_classes, activation="none").to(memory_format=torch.channels_last)
    model.to(device)  # step 9: to this process's device at once, not to GPU 0 first (mistake 5)
    model = DistributedDataParallel(model, device_ids=[local_rank] if on_gpu else None)  # step 10: wrap
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    accuracy, step = {}, 0
    for epoch in range(flags.epochs):
        train_sampler.set_epoch(epoch)  # step 7: another order each time: of the counter, not of their number (mistake 1)
        model.train()
        start, first = time.perf_counter(), step
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)  # step 11: the batch to the device
            optimizer.zero_grad()  # step 12: the step; backward averages the gradients over the processes
            loss = cross_entropy(model(data.normalize_images(images)), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % flags.report_every == 0:
                dist.all_reduce(loss.detach())  # `loss` is the sum over all processes then
                mean = loss.item() / world_size  # waits for the GPU: only then the clock tells the time (mistake 7)
                milliseconds = 1000 * (time.perf_counter() - start) / (step - first)
                if rank == 0:  # step 13: report
                    print(f"epoch {epoch} step {step} loss {mean:.7f} {milliseconds:.3f} ms/step", flush=True)
                start, first = time.perf_counter(), step
        accuracy[epoch], count = evaluate(model, val, data, device)
        path = flags.weights / f"epoch_{epoch}.pth"
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.module.state_dict(), path)  # step 14: save, without the wrapper's "module." (mistake 6)
            print(f"epoch {epoch} validation accuracy {accuracy[epoch]:.4f} on {count} images, saved {path}", flush=True)

    best = flags.weights / f"epoch_{max(accuracy, key=accuracy.get)}.pth"
    dist.barrier()  # rank 0 has saved it
    # step 15: load, wherever it was saved; weights_only, because a file from elsewhere could run code (mistake 11)
    model.module.load_state_dict(torch.load(best, map_location=device, weights_only=True))
    test_accuracy, count = evaluate(model, test, data, device)
    if rank == 0:
        print(f"test accuracy {test_accuracy:.4f} on {count} images, with {best}")
    dist.destroy_process_group()  # step 16: clean up


if __name__ == "__main__":
    run(main)

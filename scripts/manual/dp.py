"""P3, training on several GPUs in one process (DP) by hand: plain PyTorch, as cpu.py, gpu.py and ddp.py.

    python scripts/manual/dp.py         all GPUs; some: CUDA_VISIBLE_DEVICES=0,2 python scripts/manual/dp.py

The batch splits, and with it the forward and the backward pass: a replica on each GPU. GPU 0 alone gathers the outputs,
computes the loss and adds up the gradients: not "the backward" (mistake 12). Without a GPU nothing splits.
The template: `python scripts/train.py --config configs/manual.yaml --strategy dp`. Numbers: see the README.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the `project` of this clone
# step 2: CUDA_VISIBLE_DEVICES=0,2 python ... chooses GPUs; after torch is imported it may come too late (mistake 2)

import torch
from command_line import make_parser, run
from torch.nn import DataParallel
from torch.nn.functional import cross_entropy
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
    return (counts[0] / counts[1]).item(), int(counts[1])


def main():
    flags = make_parser(__doc__, weights="logs/manual/dp").parse_args()
    # step 3: check the accelerator; this program runs on the CPU too
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    parts = [
        len(part) for part in torch.arange(flags.batch_size).chunk(len(gpus) or 1)
    ]  # step 8: nothing: DataParallel splits it
    print(f"{len(gpus)} GPUs: " + (f"a batch splits into {parts}" if gpus else "nothing splits, all runs on the CPU"))

    data = ImageDataModule(flags.source, flags.root, flags.batch_size, shift=0, flip=False, normalize=False)
    data.prepare_data()
    data.setup()
    train_sampler = GlobalBatchSampler(data.train_batches, data.train_positions, flags.batch_size)
    val_sampler = EvaluationSampler(data.val_batches, data.val_positions, 500)
    test_sampler = EvaluationSampler(data.test_batches, data.test_positions, 500)
    train, val, test = (DataLoader(s.dataset, None, sampler=s) for s in (train_sampler, val_sampler, test_sampler))

    torch.manual_seed(0)
    model = ConvNet(flags.channels, flags.hidden, data.num_classes, activation="none").to(memory_format=torch.channels_last)
    model.to(device)  # step 9: to the first GPU, before it is wrapped
    model = DataParallel(model, device_ids=gpus)  # step 10: wrap; without a GPU it passes everything through
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    accuracy, step = {}, 0
    for epoch in range(flags.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        start, first = time.perf_counter(), step
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)  # step 11: the batch to the device
            optimizer.zero_grad()  # step 12: the step; backward adds the gradients up on GPU 0
            loss = cross_entropy(model(data.normalize_images(images)), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % flags.report_every == 0:
                mean = loss.item()  # waits for the GPU: only then the clock tells the time (mistake 7)
                milliseconds = 1000 * (time.perf_counter() - start) / (step - first)
                # step 13: report
                print(f"epoch {epoch} step {step} loss {mean:.7f} {milliseconds:.3f} ms/step", flush=True)
                start, first = time.perf_counter(), step
        accuracy[epoch], count = evaluate(model, val, data, device)
        path = flags.weights / f"epoch_{epoch}.pth"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), path)  # step 14: save, without the wrapper's "module." (mistake 6)
        print(f"epoch {epoch} validation accuracy {accuracy[epoch]:.4f} on {count} images, saved {path}", flush=True)

    best = flags.weights / f"epoch_{max(accuracy, key=accuracy.get)}.pth"
    # step 15: load, wherever it was saved; weights_only, because a file from elsewhere could run code (mistake 11)
    model.module.load_state_dict(torch.load(best, map_location=device, weights_only=True))
    test_accuracy, count = evaluate(model, test, data, device)
    print(f"test accuracy {test_accuracy:.4f} on {count} images, with {best}")


if __name__ == "__main__":
    run(main)

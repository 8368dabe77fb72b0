"""P1, training on the CPU by hand: plain PyTorch, all that Lightning would do for us written out.

    python scripts/manual/cpu.py        their size: --channels 32 64 512 1024 2048 4096 --hidden 8000

The articles' setting, without activation functions, hardly learns at the default width. That is theirs, not a fault.
The template: `python scripts/train.py --config configs/manual.yaml --accelerator cpu --devices 1`. Numbers: see the README.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the `project` of this clone

import torch
from command_line import make_parser, run
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from project.data.batches import EvaluationSampler, GlobalBatchSampler
from project.data.datamodule import ImageDataModule
from project.model.networks import ConvNet


@torch.no_grad()
def evaluate(model, loader, data):
    model.eval()  # the articles promise a validation and have none (mistake 10)
    counts = torch.zeros(2)  # correct, all
    for images, labels in loader:
        guesses = model(data.normalize_images(images)).argmax(dim=1)
        counts += torch.stack([(guesses == labels).sum(), (labels >= 0).sum()])  # a blank image's label is negative
    return (counts[0] / counts[1]).item(), int(counts[1])


def main():
    flags = make_parser(__doc__, weights="logs/manual/cpu").parse_args()

    data = ImageDataModule(flags.source, flags.root, flags.batch_size, shift=0, flip=False, normalize=False)
    data.prepare_data()
    data.setup()
    train_sampler = GlobalBatchSampler(data.train_batches, data.train_positions, flags.batch_size)
    val_sampler = EvaluationSampler(data.val_batches, data.val_positions, 500)
    test_sampler = EvaluationSampler(data.test_batches, data.test_positions, 500)
    train, val, test = (DataLoader(s.dataset, None, sampler=s) for s in (train_sampler, val_sampler, test_sampler))

    torch.manual_seed(0)
    model = ConvNet(flags.channels, flags.hidden, data.num_classes, activation="none").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    accuracy, step = {}, 0
    for epoch in range(flags.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        start, first = time.perf_counter(), step
        for images, labels in train:
            optimizer.zero_grad()  # step 12: the step
            loss = cross_entropy(model(data.normalize_images(images)), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % flags.report_every == 0:
                mean = loss.item()
                milliseconds = 1000 * (time.perf_counter() - start) / (step - first)
                # step 13: report
                print(f"epoch {epoch} step {step} loss {mean:.7f} {milliseconds:.3f} ms/step", flush=True)
                start, first = time.perf_counter(), step
        accuracy[epoch], count = evaluate(model, val, data)
        path = flags.weights / f"epoch_{epoch}.pth"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)  # step 14: save
        print(f"epoch {epoch} validation accuracy {accuracy[epoch]:.4f} on {count} images, saved {path}", flush=True)

    best = flags.weights / f"epoch_{max(accuracy, key=accuracy.get)}.pth"
    # step 15: load, wherever it was saved; weights_only, because a file from elsewhere could run code (mistake 11)
    model.load_state_dict(torch.load(best, map_location="cpu", weights_only=True))
    test_accuracy, count = evaluate(model, test, data)
    print(f"test accuracy {test_accuracy:.4f} on {count} images, with {best}")


if __name__ == "__main__":
    run(main)

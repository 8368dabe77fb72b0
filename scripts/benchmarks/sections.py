"""The sections of scripts/benchmark.py on loops, input and recipes. The first side of a row is the template."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.communication import communication
from benchmarks.measure import (
    DEFAULT_CHANNELS,
    KEPT_MEMORY,
    MILLISECONDS,
    ROOT,
    SPEED,
    SYNTHETIC_TRAINING_IMAGES,
    Row,
    Settings,
    alternate,
    figures,
    matmul_gflops,
    over,
    python,
    train,
    training_speed,
)
from benchmarks.resources import memory, scaling, size, start
from benchmarks.turns import EPOCHS_BESIDE, Program, take_turns, training
from project.data.datamodule import ImageDataModule

MANUAL, BENCHMARKS = ROOT / "scripts" / "manual", ROOT / "scripts" / "benchmarks"
PLAIN_SPEED = BENCHMARKS / "plain_speed.py"
RECORD = "record's work"
DEFAULT_SIZE = {"channels": DEFAULT_CHANNELS, "hidden": 128}
TINY_SIZE = {"channels": [1, 1, 1, 1, 1, 1], "hidden": 1}


# ---- step


def step(settings: Settings) -> list[Row]:
    """What the loops add to a step: ours, with all it writes, one written by hand, and a plain Lightning script.

    The tiny network runs with one thread: what is measured there is Python, which has no more, and two threads waiting for
    each other add more noise than that. On the default network only ours and the one by hand, whole epochs: both validate,
    and save their weights. Everything computes the articles' recipe, which is what the loop by hand does, in memory that is
    kept, as ours keeps it. Bars are kept up to date but not drawn: the output goes into a pipe.
    """
    epochs, starts = settings.epochs, 1 if settings.quick else 3
    loops = {side: replace(loop, threads=1, one_core=True) for side, loop in _loops(TINY_SIZE, 8, epochs).items()}
    tiny = take_turns("step, tiny network", loops, epochs, starts)
    rounds = zip(tiny["template"], tiny["by hand"], tiny["plain Lightning"], strict=True)
    share = statistics.median((ours - hand) / (plain - hand) for ours, hand, plain in rounds)
    loops = _loops(DEFAULT_SIZE, 64, epochs)
    epoch = {"template": r"^epoch \d+/", "by hand": r"^epoch \d+ validation"}
    loops = {side: replace(loops[side], pattern=pattern, convert=float) for side, pattern in epoch.items()}
    default = take_turns("step, default network", loops, epochs, starts)
    return [
        Row("step", "tiny network", "µs/step", tiny, ("overhead, as a share of plain Lightning's,", share)),
        Row("step", "default network", "s/epoch", default, ("template over by hand", over(default, "template", "by hand"))),
    ]


def _loops(size: dict[str, Any], batch_size: int, epochs: int) -> dict[str, Program]:
    channels, more = size["channels"], epochs + EPOCHS_BESIDE
    common = ["--epochs", more, "--batch_size", batch_size, "--channels", *channels, "--hidden", size["hidden"]]
    hand = ["--source", "synthetic", "--report_every", SYNTHETIC_TRAINING_IMAGES // batch_size, "--weights", "{folder}"]
    ours: list[object] = ["--max_epochs", more, "--batch_size", batch_size, "--devices", 1]
    ours += ["--model.network.channels", json.dumps(channels), "--model.network.hidden", size["hidden"]]
    ours += ["--trainer.callbacks", "null", "--trainer.enable_progress_bar", "true"]

    def by_milliseconds(*command: object) -> Program:
        return Program([*command, *common], MILLISECONDS, convert=lambda ms: 1e3 * ms, variables=KEPT_MEMORY)

    return {
        "template": replace(training(*ours, config="manual.yaml"), convert=lambda speed: 1e6 * batch_size / speed),
        "by hand": by_milliseconds(MANUAL / "cpu.py", *hand),
        "plain Lightning": by_milliseconds(BENCHMARKS / "plain_lightning.py", "--logs", "{folder}"),
    }


# ---- input


class _PerImage(Dataset[tuple[torch.Tensor, int]]):
    """What torchvision's tutorials do: a PIL image at a time."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        from torchvision import transforms

        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        self.transform = transforms.Compose([*steps, transforms.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))])
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def pipeline(settings: Settings) -> list[Row]:
    """Images per second: shifted, mirrored, normalised, batched by 64."""
    data = ImageDataModule("synthetic", val_fraction=0)
    data.prepare_data()
    data.setup()
    loader = data.train_dataloader()
    source = data.train_batches

    def ours() -> float:
        count, start = 0, time.perf_counter()
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for batch in loader:
                count += len(data.on_after_batch_transfer(batch, 0)[1])
        return count / (time.perf_counter() - start)

    def theirs(workers: int) -> Callable[[], float]:
        dataset = _PerImage(source.images, source.labels)
        per_image = DataLoader(dataset, 64, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        for _ in per_image:  # workers start
            pass

        def measure() -> float:
            start = time.perf_counter()
            count = sum(len(labels) for _, labels in per_image)
            return count / (time.perf_counter() - start)

        return measure

    sides = {"template": ours, "torchvision, 0 workers": theirs(0), "torchvision, 2 workers": theirs(2)}
    samples = alternate("input", sides, settings.repeats)
    ratio = over(samples, "template", "torchvision, 2 workers")
    return [Row("input", "shift, mirror, normalise", "images/s", samples, ("times torchvision with 2 workers", ratio))]


# ---- recipe


def recipe(settings: Settings) -> list[Row]:
    """Images per second of configs/speed.yaml, all told, and of the published record's steps alone, in plain PyTorch."""
    flags: list[object] = ["--devices", 1, "--max_epochs", 2, "--data.eval_batch_size", 100]
    flags += ["--trainer.limit_train_batches", 2 if settings.quick else 5]
    sides = {
        "template": lambda: training_speed(*flags, config="speed.yaml"),
        "record's steps": lambda: _record(1 if settings.quick else 3)[0],
    }
    samples = alternate("recipe", sides, settings.repeats)
    ratio = over(samples, "record's steps", "template")
    return [Row("recipe", "configs/speed.yaml", "images/s", samples, ("time for an image, over the record's,", ratio))]


def _record(steps: int) -> tuple[float, float]:
    """Return the images per second of the record's steps, over its epochs, and of one view in its evaluation, on the CPU."""
    output = python(PLAIN_SPEED, "--steps", steps)
    kinds = (rf"^{kind} \d+: ([\d,]+) images/s" for kind in ("bias", "step", "view"))
    bias, step, view = (statistics.median(figures(kind, output)) for kind in kinds)
    return 1 / (3 / 8 / bias + 5 / 8 / step), view


# ---- accuracy


def accuracy(settings: Settings) -> list[Row]:
    """configs/speed.yaml on real CIFAR-10 and the CPU: test accuracy and seconds; the record's work before and after."""
    accuracies: dict[str, list[float]] = {"template": []}
    seconds: dict[str, list[float]] = {"whole command": [], RECORD: [], "training": []}
    before: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    records = [_record_seconds(settings.quick)]
    for seed in settings.seeds:
        for kind, values in before.items():
            values.append(matmul_gflops(getattr(torch, kind)))
        took, summary = _whole_recipe(settings, seed, "cpu")
        records.append(_record_seconds(settings.quick))
        seconds["whole command"].append(took)
        seconds["training"].append(summary["train_seconds"])
        seconds[RECORD].append((records[-2] + records[-1]) / 2)
        accuracies["template"].append(summary["test_accuracy"])
        products = ", ".join(f"{values[-1]:.0f} GFLOP/s in {kind}" for kind, values in before.items())
        told = f"accuracy {summary['test_accuracy']:.4f} in {took:.0f} s; {RECORD} would take {seconds[RECORD][-1]:.0f} s"
        print(f"accuracy  seed {seed}: {told}; a matrix product before it: {products}", flush=True)
    more = {"seeds": settings.seeds, "processes": settings.devices, "matrix product, GFLOP/s": before}
    mean, ratio = statistics.mean(accuracies["template"]), over(seconds, "whole command", RECORD)
    return [
        Row("accuracy", "configs/speed.yaml", "of 1", accuracies, ("mean", mean), more),
        Row("accuracy", "configs/speed.yaml, time", "s", seconds, ("of the record's", ratio)),
    ]


def _whole_recipe(settings: Settings, seed: int, accelerator: str) -> tuple[float, dict[str, Any]]:
    """Train and test with configs/speed.yaml; return the command's seconds and its summary."""
    flags: list[object] = ["--accelerator", accelerator, "--devices", settings.devices]
    flags += ["--strategy", "ddp"] if settings.devices > 1 else []
    flags += ["--data.source", "folder", "--data.root", settings.root]
    flags += ["--max_epochs", 1, "--trainer.limit_train_batches", 2] if settings.quick else []
    began = time.perf_counter()
    _, summary = train("--seed", seed, *flags, config="speed.yaml")
    return time.perf_counter() - began, summary


def _record_seconds(quick: bool) -> float:
    """Return what the record's 200 steps of 2,000 images and six views of 10,000 would take now, by a few of each."""
    steps, view = _record(1 if quick else 4)
    return 200 * 2000 / steps + 6 * 10000 / view


# ---- gpu


def gpu(settings: Settings) -> list[Row]:
    """The articles' network by precision, dp against ddp, and, with `--root`, configs/speed.yaml."""
    if not torch.cuda.is_available():
        print("gpu: not measured, there is none here")
        return []
    base: list[object] = ["--data.source", "synthetic", "--accelerator", "gpu", "--max_epochs", 3]
    base += ["--trainer.callbacks", "null", "--trainer.limit_train_batches", 20 if settings.quick else 80]
    base += ["--trainer.limit_val_batches", 0, "--trainer.limit_test_batches", 1]

    def speed(*flags: object, **variables: str) -> Callable[[], float]:
        return lambda: statistics.median(figures(SPEED, train(*base, *flags, config="documents.yaml", **variables)[0]))

    one: list[object] = ["--devices", 1]
    sides = {
        "float32": speed(*one, NVIDIA_TF32_OVERRIDE="0"),
        "TensorFloat-32": speed(*one, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1"),
        "bfloat16": speed(*one, "--precision", "bf16-mixed"),
    }
    samples = alternate("gpu", sides, settings.repeats)
    ratio = over(samples, "bfloat16", "float32")
    rows = [Row("gpu", "articles' network, 1 GPU", "images/s", samples, ("bfloat16 over float32", ratio))]
    if torch.cuda.device_count() > 1:
        two: list[object] = ["--devices", 2]
        samples = alternate("gpu", {name: speed(*two, "--strategy", name) for name in ("ddp", "dp")}, settings.repeats)
        ratio = over(samples, "ddp", "dp")
        rows.append(Row("gpu", "articles' network, 2 GPUs", "images/s", samples, ("ddp over dp", ratio)))
    if settings.root is None:
        print("gpu: without --root (real CIFAR-10) configs/speed.yaml is not measured")
        return rows
    runs = [_whole_recipe(settings, seed, "gpu") for seed in settings.seeds]
    accuracies = [summary["test_accuracy"] for _, summary in runs]
    times = {"template": [took for took, _ in runs], "training": [summary["train_seconds"] for _, summary in runs]}
    more = {"seeds": settings.seeds, "processes": settings.devices, "accuracies": accuracies}
    ratio_of = ("mean accuracy", statistics.mean(accuracies))
    return [*rows, Row("gpu", "configs/speed.yaml, time", "s", times, ratio_of, more)]


ALL: dict[str, Callable[[Settings], list[Row]]] = {
    "step": step,
    "input": pipeline,
    "scaling": scaling,
    "communication": communication,
    "memory": memory,
    "start": start,
    "size": size,
    "recipe": recipe,
    "accuracy": accuracy,
    "gpu": gpu,
}

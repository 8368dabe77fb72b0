"""The sections of scripts/benchmark.py on loops, input and recipes. The first side of a row is the template."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import (
    DEFAULT_CHANNELS,
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
from project.data.datamodule import ImageDataModule

MANUAL, BENCHMARKS = ROOT / "scripts" / "manual", ROOT / "scripts" / "benchmarks"
PLAIN_SPEED, STEP_SPEED, VIEW_SPEED = BENCHMARKS / "plain_speed.py", r"step \d+: ([\d,]+)", r"view \d+: ([\d,]+)"
RECORD = "record's work"
DEFAULT_SIZE = {"channels": DEFAULT_CHANNELS, "hidden": 128}
TINY_SIZE = {"channels": [1, 1, 1, 1, 1, 1], "hidden": 1}


# ---- step


def step(settings: Settings) -> list[Row]:
    """What the loops add to a step: ours, with all it writes, one written by hand, and a plain Lightning script."""
    epochs = 2 if settings.quick else 5
    tiny = alternate("step, tiny network", _loops(TINY_SIZE, 8, epochs), settings.repeats)
    rounds = zip(tiny["template"], tiny["by hand"], tiny["plain Lightning"], strict=True)
    share = statistics.median((ours - hand) / (plain - hand) for ours, hand, plain in rounds)
    default = alternate("step, default network", _loops(DEFAULT_SIZE, 64, epochs), settings.repeats)
    return [
        Row("step", "tiny network", "µs/step", tiny, ("overhead, as a share of plain Lightning's,", share)),
        Row("step", "default network", "µs/step", default, ("template over by hand", over(default, "template", "by hand"))),
    ]


def _loops(size: dict[str, Any], batch_size: int, epochs: int) -> dict[str, Callable[[], float]]:
    channels = size["channels"]
    common = ["--epochs", epochs, "--batch_size", batch_size, "--channels", *channels, "--hidden", size["hidden"]]

    def by_hand() -> float:
        with tempfile.TemporaryDirectory() as weights:
            flags = [*common, "--source", "synthetic", "--report_every", SYNTHETIC_TRAINING_IMAGES // batch_size]
            output = python(MANUAL / "cpu.py", *flags, "--weights", weights)
            return 1e3 * statistics.median(figures(MILLISECONDS, output))

    def template() -> float:
        flags: list[object] = ["--max_epochs", epochs, "--batch_size", batch_size, "--devices", 1]
        flags += ["--model.network.channels", json.dumps(channels), "--model.network.hidden", size["hidden"]]
        flags += ["--trainer.callbacks", "null", "--trainer.enable_progress_bar", "true"]
        return 1e6 * batch_size / training_speed(*flags, config="manual.yaml")

    def plain() -> float:
        with tempfile.TemporaryDirectory() as logs:
            output = python(BENCHMARKS / "plain_lightning.py", *common, "--logs", logs)
            return 1e3 * statistics.median(figures(MILLISECONDS, output))

    return {"template": template, "by hand": by_hand, "plain Lightning": plain}


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
    """Images per second of configs/speed.yaml, all told, and of the published record's step alone, in plain PyTorch."""
    flags: list[object] = ["--devices", 1, "--max_epochs", 2, "--data.eval_batch_size", 100]
    flags += ["--trainer.limit_train_batches", 2 if settings.quick else 5]
    steps = 1 if settings.quick else 3
    sides = {
        "template": lambda: training_speed(*flags, config="speed.yaml"),
        "record's step": lambda: statistics.median(figures(STEP_SPEED, python(PLAIN_SPEED, "--steps", steps))),
    }
    samples = alternate("recipe", sides, settings.repeats)
    ratio = over(samples, "record's step", "template")
    return [Row("recipe", "configs/speed.yaml", "images/s", samples, ("time for an image, over the record's,", ratio))]


# ---- accuracy


def accuracy(settings: Settings) -> list[Row]:
    """configs/speed.yaml on real CIFAR-10: test accuracy and seconds, for every seed; the record's work before and after."""
    assert settings.root is not None
    accuracies: dict[str, list[float]] = {"template": []}
    seconds: dict[str, list[float]] = {"whole command": [], RECORD: [], "training": []}
    before: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    flags: list[object] = ["--devices", settings.devices, *(["--strategy", "ddp"] if settings.devices > 1 else [])]
    flags += ["--data.source", "folder", "--data.root", settings.root]
    flags += ["--max_epochs", 1, "--trainer.limit_train_batches", 2] if settings.quick else []
    records = [_record_seconds(settings.quick)]
    for seed in settings.seeds:
        for kind, values in before.items():
            values.append(matmul_gflops(getattr(torch, kind)))
        began = time.perf_counter()
        _, summary = train("--seed", seed, *flags, config="speed.yaml")
        seconds["whole command"].append(time.perf_counter() - began)
        seconds["training"].append(summary["train_seconds"])
        records.append(_record_seconds(settings.quick))
        seconds[RECORD].append((records[-2] + records[-1]) / 2)
        accuracies["template"].append(summary["test_accuracy"])
        products = ", ".join(f"{values[-1]:.0f} GFLOP/s in {kind}" for kind, values in before.items())
        told = f"accuracy {accuracies['template'][-1]:.4f} in {seconds['whole command'][-1]:.0f} s"
        told += f"; the record's work would take {seconds[RECORD][-1]:.0f} s"
        print(f"accuracy  seed {seed}: {told}; a matrix product before it: {products}", flush=True)
    more = {"seeds": settings.seeds, "processes": settings.devices, "matrix product, GFLOP/s": before}
    mean, ratio = statistics.mean(accuracies["template"]), over(seconds, "whole command", RECORD)
    return [
        Row("accuracy", "configs/speed.yaml", "of 1", accuracies, ("mean", mean), more),
        Row("accuracy", "configs/speed.yaml, time", "s", seconds, ("of the record's", ratio)),
    ]


def _record_seconds(quick: bool) -> float:
    """Return what the record's 200 steps of 2,000 images and six views of 10,000 would take now, by a few of each."""
    output = python(PLAIN_SPEED, "--steps", 1 if quick else 5)
    step, view = (statistics.median(figures(pattern, output)) for pattern in (STEP_SPEED, VIEW_SPEED))
    return 200 * 2000 / step + 6 * 10000 / view


# ---- gpu


def gpu(settings: Settings) -> list[Row]:
    """The articles' network in float32, TensorFloat-32 and bfloat16, and dp against ddp."""
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
    return rows


ALL: dict[str, Callable[[Settings], list[Row]]] = {
    "step": step,
    "input": pipeline,
    "scaling": scaling,
    "memory": memory,
    "start": start,
    "size": size,
    "recipe": recipe,
    "accuracy": accuracy,
    "gpu": gpu,
}

"""The sections of scripts/benchmark.py. Each returns its rows; the first side of a row is the template."""

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import ROOT, Row, Settings, alternate, figures, matmul_gflops, over, python, run
from project.data.datamodule import ImageDataModule

TRAIN, MANUAL = ROOT / "scripts" / "train.py", ROOT / "scripts" / "manual"
PLAIN = ROOT / "scripts" / "benchmarks" / "plain_lightning.py"
SPEED = r"([\d,]+) images/s"
MILLISECONDS = r"([\d.]+) ms/step"
SYNTHETIC_TRAINING_IMAGES = 5400  # of 6,000; a tenth is for validation
DEFAULT_SIZE = {"channels": [16, 16, 32, 32, 64, 64], "hidden": 128}
TINY_SIZE = {"channels": [1, 1, 1, 1, 1, 1], "hidden": 1}


def train(
    *flags: object, threads: int | None = None, watch: Callable[[int], None] | None = None
) -> tuple[str, dict[str, Any]]:
    """Run scripts/train.py; return what it printed and its summary."""
    with tempfile.TemporaryDirectory() as logs:
        output = python(TRAIN, "--log_dir", logs, *flags, threads=threads, watch=watch)
        return output, json.loads(next(Path(logs).glob("*/*/summary.json")).read_text())


def training_speed(*flags: object, threads: int | None = None) -> float:
    """Return images per second in training, the median over the epochs but the first, of synthetic images on the CPU."""
    where = ["--data.source", "synthetic", "--accelerator", "cpu", "--trainer.limit_test_batches", 1]
    return statistics.median(figures(SPEED, train(*where, *flags, threads=threads)[0]))


# ---- step


def step(settings: Settings) -> list[Row]:
    """What the loops add to a step: ours, written by hand, and a plain Lightning script."""
    rows = []
    for what, size, batch_size in (("tiny network", TINY_SIZE, 8), ("default network", DEFAULT_SIZE, 64)):
        sides = _loops(size, batch_size, 2 if settings.quick else 5)
        samples = alternate("step", sides, settings.repeats)
        if what == "tiny network":
            medians = {side: statistics.median(values) for side, values in samples.items()}
            by_hand, ours, plain = medians["by hand"], medians["template"], medians["plain Lightning"]
            rows.append(
                Row("step", what, "µs/step", samples, ("overhead over plain's", (ours - by_hand) / (plain - by_hand)))
            )
        else:
            rows.append(Row("step", what, "µs/step", samples, ("template / by hand", over(samples, "template", "by hand"))))
    return rows


def _loops(size: dict[str, Any], batch_size: int, epochs: int) -> dict[str, Callable[[], float]]:
    channels, steps = size["channels"], SYNTHETIC_TRAINING_IMAGES // batch_size
    scratch = Path(tempfile.gettempdir())

    def by_hand() -> float:
        with tempfile.TemporaryDirectory() as weights:
            flags = ["--source", "synthetic", "--epochs", epochs, "--batch_size", batch_size, "--report_every", steps]
            flags += ["--channels", *channels, "--hidden", size["hidden"], "--weights", weights]
            return 1e3 * statistics.median(figures(MILLISECONDS, python(MANUAL / "cpu.py", *flags)))

    def template() -> float:
        flags: list[object] = [
            "--config",
            ROOT / "configs" / "manual.yaml",
            "--max_epochs",
            epochs,
            "--batch_size",
            batch_size,
        ]
        flags += ["--model.network.channels", json.dumps(channels), "--model.network.hidden", size["hidden"]]
        flags += ["--trainer.callbacks", "null", "--devices", 1, "--trainer.enable_progress_bar", "true"]
        return 1e6 * batch_size / training_speed(*flags)

    def plain() -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as logs:
            flags = ["--channels", *channels, "--hidden", size["hidden"], "--batch_size", batch_size, "--epochs", epochs]
            return 1e3 * statistics.median(figures(MILLISECONDS, python(PLAIN, *flags, "--logs", logs)))

    return {"template": template, "by hand": by_hand, "plain Lightning": plain}


# ---- input


class _PerImage(Dataset[tuple[torch.Tensor, int]]):
    """What torchvision's tutorials do: a PIL image at a time."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        from torchvision import transforms

        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        self.transform = transforms.Compose([*steps, transforms.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))])
        self.images, self.labels = images.permute(0, 2, 3, 1).numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def input(settings: Settings) -> list[Row]:
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


# ---- scaling


def scaling(settings: Settings) -> list[Row]:
    """Images per second with ddp."""
    epochs = 2 if settings.quick else 4

    def ours(processes: int, threads: int, batch_size: int = 64, config: str = "") -> Callable[[], float]:
        flags: list[object] = ["--max_epochs", epochs, "--batch_size", batch_size, "--devices", processes]
        flags += ["--strategy", "ddp"] if processes > 1 else []
        flags += ["--config", ROOT / "configs" / config, "--trainer.callbacks", "null"] if config else []
        return lambda: training_speed(*flags, threads=threads)

    def by_hand() -> float:
        steps = SYNTHETIC_TRAINING_IMAGES // 64
        with tempfile.TemporaryDirectory() as weights:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            flags = ["--source", "synthetic", "--epochs", epochs, "--report_every", steps, "--weights", weights]
            output = run(*torchrun, MANUAL / "ddp.py", *flags, threads=1)
            return 64e3 / statistics.median(figures(MILLISECONDS, output))

    alone = {"2 processes, 1 thread": ours(2, 1), "1 process, 1 thread": ours(1, 1), "1 process, 2 threads": ours(1, 2)}
    alone["2 processes, 1 thread, twice the batch"] = ours(2, 1, batch_size=128)
    samples = alternate("scaling", alone, settings.repeats)
    strong = over(samples, "2 processes, 1 thread", "1 process, 1 thread")
    rows = [Row("scaling", "ddp, default network", "images/s", samples, ("2 processes over 1", strong))]
    weak = over(samples, "2 processes, 1 thread, twice the batch", "1 process, 1 thread")
    rows[0].more["twice the batch on 2 processes over 1"] = weak
    samples = alternate(
        "scaling", {"template": ours(2, 1, config="manual.yaml"), "manual/ddp.py": by_hand}, settings.repeats
    )
    ratio = over(samples, "template", "manual/ddp.py")
    return [*rows, Row("scaling", "ddp on 2, articles' recipe", "images/s", samples, ("times by hand", ratio))]


# ---- memory


def memory(settings: Settings) -> list[Row]:
    """Memory of the processes: the images' pages, and all."""
    rows = []
    shares: dict[str, list[float]] = {}
    for processes in (1, 2) if settings.quick else (1, 2, 4):
        watch = _Memory()
        flags = ["--data.source", "synthetic", "--accelerator", "cpu", "--devices", processes, "--max_epochs", 2]
        train(*flags, *(["--strategy", "ddp"] if processes > 1 else []), threads=1, watch=watch)
        side = f"{processes} process" + ("es" if processes > 1 else "")
        shares[side] = [watch.of_images / watch.size_of_images]
        largest = {side: [watch.largest / 2**20]}
        print(
            f"memory  {side}: images {shares[side][0]:.3f} of their size in all, largest process {largest[side][0]:,.0f} MiB"
        )
        rows.append(Row("memory", f"largest of {side} (PSS)", "MiB", largest))
    per_process = shares["2 processes"][0] - shares["1 process"][0]
    ratio = ("of the images more with a second process", per_process)
    return [Row("memory", "images in memory (PSS, all processes)", "of their size", shares, ratio), *rows]


class _Memory:
    """Watches a session's processes: the most memory that was theirs, shared pages counted in parts (PSS)."""

    def __init__(self) -> None:
        self.of_images = self.size_of_images = self.largest = 0

    def __call__(self, session: int) -> None:
        of_images, largest = 0, 0
        for process in _processes(session):
            try:
                smaps = (process / "smaps").read_text()
            except OSError:  # it has just ended
                continue
            total = 0
            for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
                share = 1024 * sum(map(int, re.findall(r"^Pss:\s+(\d+)", mapping, re.MULTILINE)))
                total += share
                first = mapping.split("\n", 1)[0]
                if first.endswith("/train_images.npy"):
                    of_images += share
                    start, end = (int(text, 16) for text in first.split()[0].split("-"))
                    self.size_of_images = max(self.size_of_images, end - start)
            largest = max(largest, total)
        self.of_images, self.largest = max(self.of_images, of_images), max(self.largest, largest)


def _processes(session: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                yield process
        except OSError:
            continue


# ---- start


def start(settings: Settings) -> list[Row]:
    """Seconds from the command to the end of the first optimizer step, and to the help."""
    one_step = ["--data.source", "synthetic", "--accelerator", "cpu", "--max_epochs", 1, "--trainer.limit_train_batches", 1]
    one_step += ["--data.val_fraction", 0, "--trainer.limit_test_batches", 1]

    def first_step(*flags: object) -> Callable[[], float]:
        def measure() -> float:
            began = time.time()
            with tempfile.TemporaryDirectory() as logs:
                python(TRAIN, "--log_dir", logs, *one_step, *flags)
                events = next(Path(logs).glob("*/*/checkpoints/last.ckpt"))
                return events.stat().st_mtime - began

        return measure

    def seconds(*command: object) -> Callable[[], float]:
        def measure() -> float:
            began = time.perf_counter()
            python(*command)
            return time.perf_counter() - began

        return measure

    sides = {"first step, 1 process": first_step(), "first step, ddp on 2": first_step("--strategy", "ddp", "--devices", 2)}
    sides |= {"--help": seconds(TRAIN, "--help"), "import lightning.pytorch": seconds("-c", "import lightning.pytorch")}
    samples = alternate("start", sides, settings.repeats)
    ratio = over(samples, "--help", "import lightning.pytorch")
    return [Row("start", "from the command", "s", samples, ("--help over the import", ratio))]


# ---- size


def size(settings: Settings) -> list[Row]:
    """Seconds an epoch over more images, and over a wider network."""
    epochs = 2 if settings.quick else 3
    rows = []
    if settings.root is not None:
        sides: dict[str, Callable[[], float]] = {}
        largest: dict[str, list[float]] = {}
        for count, fraction in ((10, 0.8), (20, 0.6), (40, 0.2)):
            sides[f"{count},000 images"] = _epoch_seconds(settings.root, fraction, epochs, f"{count},000 images", largest)
        samples = alternate("size", sides, 1 if settings.quick else min(settings.repeats, 3))
        ratio = over(samples, "40,000 images", "10,000 images")
        rows.append(Row("size", "an epoch", "s", samples, ("40,000 over 10,000", ratio)))
        growth = over(largest, "40,000 images", "10,000 images")
        rows.append(Row("size", "largest process (PSS)", "MiB", largest, ("40,000 over 10,000", growth)))
    else:
        print("size: without --root (real CIFAR-10) the number of images stays as it is")

    def wide(factor: int) -> Callable[[], float]:
        channels = json.dumps([factor * width for width in DEFAULT_SIZE["channels"]])
        flags = ["--model.network.channels", channels, "--max_epochs", 2, "--trainer.limit_train_batches", 30]
        return lambda: SYNTHETIC_TRAINING_IMAGES / training_speed(*flags)

    samples = alternate("size", {f"width x{factor}": wide(factor) for factor in (1, 2, 4)}, min(settings.repeats, 3))
    return [
        *rows,
        Row("size", "an epoch of 5,400 images", "s", samples, ("x4 over x1", over(samples, "width x4", "width x1"))),
    ]


def _epoch_seconds(
    root: Path, fraction: float, epochs: int, name: str, largest: dict[str, list[float]]
) -> Callable[[], float]:
    def measure() -> float:
        watch = _Memory()
        flags = ["--data.source", "folder", "--data.root", root, "--data.val_fraction", fraction, "--max_epochs", epochs]
        flags += ["--accelerator", "cpu", "--trainer.limit_val_batches", 0, "--trainer.limit_test_batches", 1]
        output, summary = train(*flags, "--trainer.log_every_n_steps", 100, watch=watch)
        largest.setdefault(name, []).append(watch.largest / 2**20)
        return summary["num_train_images"] / statistics.median(figures(SPEED, output))  # type: ignore[no-any-return]

    return measure


# ---- recipe


def recipe(settings: Settings) -> list[Row]:
    """Images per second of configs/speed.yaml, all told, and of the published record's step alone, in plain PyTorch."""
    flags: list[object] = ["--config", ROOT / "configs" / "speed.yaml", "--devices", 1, "--max_epochs", 2]
    flags += ["--trainer.limit_train_batches", 2 if settings.quick else 5, "--data.eval_batch_size", 100]
    plain = ROOT / "scripts" / "benchmarks" / "plain_speed.py"
    steps = 1 if settings.quick else 3
    sides = {
        "template": lambda: training_speed(*flags),
        "record's step": lambda: statistics.median(figures(SPEED, python(plain, "--steps", steps))),
    }
    samples = alternate("recipe", sides, settings.repeats)
    ratio = over(samples, "record's step", "template")
    return [Row("recipe", "configs/speed.yaml", "images/s", samples, ("time for an image, over the record's", ratio))]


# ---- accuracy


def accuracy(settings: Settings) -> list[Row]:
    """configs/speed.yaml on real CIFAR-10: test accuracy and seconds, for every seed."""
    assert settings.root is not None
    results: dict[str, list[float]] = {"test accuracy": [], "seconds": [], "of which training": []}
    before: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for seed in settings.seeds:
        for kind, values in before.items():
            values.append(matmul_gflops(getattr(torch, kind)))
        flags: list[object] = ["--config", ROOT / "configs" / "speed.yaml", "--seed", seed, "--devices", settings.devices]
        flags += ["--data.source", "folder", "--data.root", settings.root]
        flags += ["--strategy", "ddp"] if settings.devices > 1 else []
        flags += ["--max_epochs", 1, "--trainer.limit_train_batches", 2] if settings.quick else []
        began = time.perf_counter()
        _, summary = train(*flags, threads=None if settings.devices == 1 else 1)
        results["seconds"].append(time.perf_counter() - began)
        results["test accuracy"].append(summary["test_accuracy"])
        results["of which training"].append(summary["train_seconds"])
        last = "  ".join(f"{name} {values[-1]:.4f}" for name, values in results.items())
        print(
            f"accuracy  seed {seed}: {last}; matrix product before it {before['float32'][-1]:.0f} GFLOP/s in float32",
            flush=True,
        )
    mean = statistics.mean(results["test accuracy"])
    more = {"seeds": settings.seeds, "processes": settings.devices, "matrix product, GFLOP/s": before}
    by_time = {name: results[name] for name in ("seconds", "of which training")}
    return [
        Row("accuracy", "configs/speed.yaml", "", {"test accuracy": results["test accuracy"]}, ("mean", mean), more),
        Row("accuracy", "configs/speed.yaml", "s", by_time),
    ]


# ---- gpu


def gpu(settings: Settings) -> list[Row]:
    """The articles' network in float32, TensorFloat-32 and bfloat16; dp against ddp; time to accuracy."""
    if not torch.cuda.is_available():
        print("gpu: not measured, there is none here")
        return []
    steps = 20 if settings.quick else 100
    base: list[object] = ["--config", ROOT / "configs" / "documents.yaml", "--accelerator", "gpu", "--max_epochs", 3]
    base += ["--data.source", "synthetic", "--trainer.callbacks", "null", "--trainer.limit_train_batches", steps]
    base += ["--trainer.limit_val_batches", 0, "--trainer.limit_test_batches", 1]

    def speed(*flags: object, **variables: str) -> Callable[[], float]:
        return lambda: statistics.median(figures(SPEED, train(*base, *flags, **variables)[0]))

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
        rows.append(
            Row("gpu", "articles' network, 2 GPUs", "images/s", samples, ("ddp over dp", over(samples, "ddp", "dp")))
        )
    return rows


ALL: dict[str, Callable[[Settings], list[Row]]] = {
    "step": step,
    "input": input,
    "scaling": scaling,
    "memory": memory,
    "start": start,
    "size": size,
    "recipe": recipe,
    "accuracy": accuracy,
    "gpu": gpu,
}

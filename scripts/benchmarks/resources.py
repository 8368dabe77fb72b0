"""The sections of scripts/benchmark.py on processes, memory, the start and size. The first side is the template."""

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
    over,
    python,
    run,
    train,
    training_speed,
)

TRAIN, MANUAL = ROOT / "scripts" / "train.py", ROOT / "scripts" / "manual"


# ---- scaling


def scaling(settings: Settings) -> list[Row]:
    """Images per second with ddp."""
    epochs = 2 if settings.quick else 4

    def ours(processes: int, threads: int, batch_size: int = 64, config: str = "") -> Callable[[], float]:
        flags: list[object] = ["--max_epochs", epochs, "--batch_size", batch_size, "--devices", processes]
        flags += ["--strategy", "ddp"] if processes > 1 else []
        flags += ["--trainer.callbacks", "null"] if config else []
        return lambda: training_speed(*flags, threads=threads, config=config)

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
    rows, shares = [], {}
    for processes in (1, 2) if settings.quick else (1, 2, 4):
        side = f"{processes} process" + ("es" if processes > 1 else "")
        strategy = ["--strategy", "ddp"] if processes > 1 else []
        watch = _watched("--data.source", "synthetic", "--devices", processes, "--max_epochs", 3, *strategy)
        if watch is None:
            print("memory: not measured, /proc does not tell it here")
            return []
        shares[side] = [watch.of_images / watch.size_of_images]
        largest = watch.largest / 2**20
        told = f"images {shares[side][0]:.3f} of their size in all, largest process {largest:,.0f} MiB"
        print(f"memory  {side}: {told}", flush=True)
        rows.append(Row("memory", f"largest of {side} (PSS)", "MiB", {"template": [largest]}))
    ratio = ("more with a second process", shares["2 processes"][0] - shares["1 process"][0])
    return [Row("memory", "images in memory (PSS, all processes)", "of their size", shares, ratio), *rows]


def _watched(*flags: object) -> "_Memory | None":
    """Watch a run's memory; None where nothing could be seen."""
    watch = _Memory()
    train(*flags, "--accelerator", "cpu", "--trainer.limit_test_batches", 1, threads=1, watch=watch)
    return watch if watch.size_of_images else None


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
    """Seconds from the command to the checkpoint after the first optimizer step, and to the help."""
    one_step = ["--data.source", "synthetic", "--accelerator", "cpu", "--max_epochs", 1, "--trainer.limit_train_batches", 1]
    one_step += ["--data.val_fraction", 0, "--trainer.limit_test_batches", 1]

    def first_step(*flags: object) -> Callable[[], float]:
        def measure() -> float:
            began = time.time()
            with tempfile.TemporaryDirectory() as logs:
                python(TRAIN, "--log_dir", logs, *one_step, *flags)
                checkpoint = next(Path(logs).glob("*/*/checkpoints/last.ckpt"))
                return checkpoint.stat().st_mtime - began

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
    """Seconds an epoch over more images, and over a wider network; and memory over more images."""
    repeats, rows = min(settings.repeats, 3), []
    if settings.root is not None:
        of = {"10,000 images": 0.8, "20,000 images": 0.6, "40,000 images": 0.2}  # the share kept from 50,000 for validation
        flags: list[object] = ["--data.source", "folder", "--data.root", settings.root, "--accelerator", "cpu"]
        flags += ["--max_epochs", 2 if settings.quick else 3, "--trainer.limit_val_batches", 0]
        flags += ["--trainer.limit_test_batches", 1, "--trainer.log_every_n_steps", 100]

        def epoch(fraction: float) -> Callable[[], float]:
            def measure() -> float:
                output, summary = train(*flags, "--data.val_fraction", fraction)
                return summary["num_train_images"] / statistics.median(figures(SPEED, output))  # type: ignore[no-any-return]

            return measure

        one_step = ["--max_epochs", 1, "--trainer.limit_train_batches", 1]
        train(*flags, *one_step)  # decodes the images
        samples = alternate("size", {name: epoch(fraction) for name, fraction in of.items()}, repeats)
        ratio = over(samples, "40,000 images", "10,000 images")
        rows.append(Row("size", "an epoch", "s", samples, ("40,000 over 10,000", ratio)))
        watched = {name: _watched(*flags, "--data.val_fraction", fraction) for name, fraction in of.items()}
        largest = {name: [(watch.largest - watch.of_images) / 2**20] for name, watch in watched.items() if watch}
        if largest:
            growth = over(largest, "40,000 images", "10,000 images")
            rows.append(Row("size", "memory beside the images (PSS)", "MiB", largest, ("40,000 over 10,000", growth)))
    else:
        print("size: without --root (real CIFAR-10) the number of images stays as it is")

    def wide(factor: int) -> Callable[[], float]:
        channels = json.dumps([factor * width for width in DEFAULT_CHANNELS])
        flags = ["--model.network.channels", channels, "--max_epochs", 3, "--trainer.limit_train_batches", 20]
        return lambda: SYNTHETIC_TRAINING_IMAGES / training_speed(*flags)

    samples = alternate("size", {f"width x{factor}": wide(factor) for factor in (1, 2, 4)}, repeats)
    ratio = over(samples, "width x4", "width x1")
    return [*rows, Row("size", "an epoch of 5,400 images", "s", samples, ("x4 over x1", ratio))]

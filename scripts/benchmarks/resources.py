"""The sections of scripts/benchmark.py on processes, memory, the start and size. The first side is the template."""

import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import (
    DEFAULT_CHANNELS,
    KEPT_MEMORY,
    MILLISECONDS,
    ROOT,
    SYNTHETIC_TRAINING_IMAGES,
    Row,
    Settings,
    alternate,
    over,
    python,
    train,
)
from benchmarks.turns import EPOCHS_BESIDE, TRAIN, Program, take_turns, training

MANUAL = ROOT / "scripts" / "manual"


# ---- scaling


def scaling(settings: Settings) -> list[Row]:
    """Images per second with ddp."""
    epochs = settings.epochs

    def ours(processes: int, threads: int, *flags: object, config: str = "") -> Program:
        ddp = ["--strategy", "ddp"] if processes > 1 else []
        length = ["--max_epochs", epochs + EPOCHS_BESIDE, "--devices", processes]
        return training(*length, *ddp, *flags, threads=threads, config=config)

    two, one = "2 processes, 1 thread", "1 process, 1 thread"
    twice = f"{two}, twice the batch"
    sides = {two: ours(2, 1), twice: ours(2, 1, "--batch_size", 128), one: ours(1, 1), "1 process, 2 threads": ours(1, 2)}
    samples = take_turns("scaling", sides, epochs)
    weak = {twice: samples.pop(twice), one: samples[one]}
    rows = [
        Row("scaling", "ddp, default recipe", "images/s", samples, ("2 processes over 1", over(samples, two, one))),
        Row("scaling", "ddp, as many images each", "images/s", weak, ("2 processes over 1", over(weak, twice, one))),
    ]
    if not Path("/proc").exists():
        print("scaling: not measured against manual/ddp.py; only by /proc can its processes be found and stopped")
        return rows
    hand: list[object] = [MANUAL / "ddp.py", "--source", "synthetic", "--epochs", epochs + EPOCHS_BESIDE]
    hand += ["--report_every", SYNTHETIC_TRAINING_IMAGES // 64, "--weights", "{folder}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    by_hand = Program(hand, MILLISECONDS, torchrun, 1, convert=lambda ms: 64e3 / ms, variables=KEPT_MEMORY)
    both = {"template": ours(2, 1, "--trainer.callbacks", "null", config="manual.yaml"), "manual/ddp.py": by_hand}
    samples = take_turns("scaling", both, epochs)
    ratio = over(samples, "template", "manual/ddp.py")
    return [*rows, Row("scaling", "ddp on 2, articles' recipe", "images/s", samples, ("times by hand", ratio))]


# ---- memory


def memory(settings: Settings) -> list[Row]:
    """Memory of the processes: the images' pages, and all."""
    counts = (1, 2) if settings.quick else (1, 2, 4)
    shares: dict[str, list[float]] = {}
    largest: dict[str, list[float]] = {}
    train(*_for_memory(1, 1), "--trainer.limit_train_batches", 1)  # the images are made
    for turn in range(settings.repeats):
        for processes in counts:
            side = f"{processes} process" + ("es" if processes > 1 else "")
            watch = _watched(*_for_memory(processes, 1 if settings.quick else 3), *settings.shorter)
            if watch is None:
                print("memory: not measured, /proc does not tell it here")
                return []
            shares.setdefault(side, []).append(watch.of_images / watch.size_of_images)
            largest.setdefault(side, []).append(watch.largest / 2**20)
            told = f"images {shares[side][-1]:.3f} of their size in all, largest process {largest[side][-1]:,.0f} MiB"
            print(f"memory  round {turn + 1}/{settings.repeats}  {side}: {told}", flush=True)
    first, last = next(iter(shares)), list(shares)[-1]
    more = statistics.median(b - a for a, b in zip(shares[first], shares[last], strict=True)) / (counts[-1] - 1)
    return [
        Row("memory", "images (PSS, all processes)", "of their size", shares, ("more with each process", more)),
        Row("memory", "largest process (PSS)", "MiB", largest),
    ]


def _for_memory(processes: int, epochs: int) -> list[object]:
    strategy = ["--strategy", "ddp"] if processes > 1 else []
    return ["--data.source", "synthetic", "--devices", processes, "--max_epochs", epochs, "--accelerator", "cpu", *strategy]


def _watched(*flags: object) -> "_Memory | None":
    """Watch a run's memory; None where nothing could be seen."""
    watch = _Memory()
    train(*flags, "--trainer.limit_test_batches", 1, threads=1, watch=watch)
    return watch if watch.size_of_images else None


class _Memory:
    """Watches a session's processes: the most memory that was theirs, shared pages counted in parts (PSS).

    Attributes:
        of_images: The images' pages in all processes, bytes.
        size_of_images: The images' size, bytes.
        largest: The largest process, bytes.
        besides: The largest process without the images' pages, bytes.
    """

    def __init__(self) -> None:
        self.of_images = self.size_of_images = self.largest = self.besides = 0

    def __call__(self, session: int) -> None:
        of_all = 0
        for process in _processes(session):
            try:
                smaps = (process / "smaps").read_text()
            except OSError:  # it has just ended
                continue
            total = of_images = 0
            for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
                share = 1024 * sum(map(int, re.findall(r"^Pss:\s+(\d+)", mapping, re.MULTILINE)))
                total += share
                first = mapping.split("\n", 1)[0]
                if first.endswith("/train_images.npy"):
                    of_images += share
                    start, end = (int(text, 16) for text in first.split()[0].split("-"))
                    self.size_of_images = max(self.size_of_images, end - start)
            of_all += of_images
            self.largest, self.besides = max(self.largest, total), max(self.besides, total - of_images)
        self.of_images = max(self.of_images, of_all)


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
    rows = []
    epochs = settings.epochs
    length: list[object] = ["--max_epochs", epochs + EPOCHS_BESIDE]
    if settings.root is not None:
        of = {"10,000 images": 0.8, "20,000 images": 0.6, "40,000 images": 0.2}  # the share kept from 50,000 for validation
        flags: list[object] = ["--data.source", "folder", "--data.root", settings.root, "--accelerator", "cpu"]
        one_step = ["--max_epochs", 1, "--trainer.limit_train_batches", 1, "--trainer.limit_test_batches", 1]
        train(*flags, *one_step)  # decodes the images
        flags += [*length, "--trainer.limit_val_batches", 0, "--trainer.log_every_n_steps", 100]

        def epoch(name: str) -> Program:
            count = int(name.split()[0].replace(",", ""))
            return replace(training(*flags, "--data.val_fraction", of[name]), convert=lambda speed: count / speed)

        besides: dict[str, list[float]] = {name: [] for name in of}

        def watch(name: str, session: int) -> None:
            memory = _Memory()
            memory(session)
            besides[name].append(memory.besides / 2**20)

        samples = take_turns("size", {name: epoch(name) for name in of}, epochs, watch=watch)
        ratio = over(samples, "40,000 images", "10,000 images")
        rows.append(Row("size", "an epoch", "s", samples, ("40,000 over 10,000", ratio)))
        if min(map(min, besides.values())) > 0:
            growth = over(besides, "40,000 images", "10,000 images")
            rows.append(Row("size", "memory beside the images (PSS)", "MiB", besides, ("40,000 over 10,000", growth)))
    else:
        print("size: without --root (real CIFAR-10) the number of images stays as it is")

    def wide(factor: int) -> Program:
        channels = json.dumps([factor * width for width in DEFAULT_CHANNELS])
        steps = settings.shorter or ["--trainer.limit_train_batches", 20]
        program = training("--model.network.channels", channels, *length, *steps)
        return replace(program, convert=lambda speed: SYNTHETIC_TRAINING_IMAGES / speed)

    most = 2 if settings.quick else 4
    samples = take_turns("size", {f"width x{factor}": wide(factor) for factor in (1, 2, 4) if factor <= most}, epochs)
    ratio = over(samples, f"width x{most}", "width x1")
    return [*rows, Row("size", "5,400 images, by some steps' speed", "s", samples, (f"x{most} over x1", ratio))]

"""How things are measured: real programs in processes of their own, sides taken in turn, medians."""

import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from project.run.memory import BYTES_TO_KEEP
from project.run.summary import versions

ROOT = Path(__file__).resolve().parents[2]
SPEED = r"^epoch \d+/.* ([\d,]+) images/s$"  # of an epoch's line; the closing lines have one of the whole run
SYNTHETIC_TRAINING_IMAGES = 5400  # of 6,000; a tenth is for validation
QUICK_STEPS = 10  # of an epoch, by --quick
DEFAULT_CHANNELS = [16, 16, 32, 32, 64, 64]
MILLISECONDS = r"([\d.]+) ms/step"
# What train.py asks of the C library (project/run/memory.py), for programs that do not, so that only the loops differ.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(BYTES_TO_KEEP)}


@dataclass
class Settings:
    """What the command line asks for: see its `--help`."""

    quick: bool
    repeats: int
    root: Path | None
    seeds: list[int]
    devices: int

    @property
    def epochs(self) -> int:
        """Samples from one start of programs that take turns."""
        return 1 if self.quick else self.repeats

    @property
    def shorter(self) -> list[object]:
        """Flags of train.py: epochs of ten steps, where it is to be quick; what is compared must not need whole ones."""
        few: list[object] = ["--trainer.limit_train_batches", QUICK_STEPS, "--trainer.limit_val_batches", 1]
        return few if self.quick else []


@dataclass
class Row:
    """One comparison.

    Attributes:
        section: Its section.
        what: What is compared.
        unit: Of the samples.
        samples: By side, in the order measured; the first side is the template.
        ratio: A figure that follows from the medians, and what it is; None for none.
    """

    section: str
    what: str
    unit: str
    samples: dict[str, list[float]]
    ratio: tuple[str, float] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        """The median of every side."""
        return {side: statistics.median(values) for side, values in self.samples.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        ratio = None if self.ratio is None else {"what": self.ratio[0], "value": self.ratio[1]}
        told = {"section": self.section, "what": self.what, "unit": self.unit, "medians": self.medians}
        return {**told, "ratio": ratio, "samples": self.samples, **self.more}


def over(samples: dict[str, list[float]], above: str, below: str) -> float:
    """Return the median, over the rounds, of one side's sample divided by the other's of the same round."""
    return statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))


def alternate(section: str, sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Take a sample of every side in turn, `repeats` times, beginning with another side each time."""
    samples: dict[str, list[float]] = {side: [] for side in sides}
    names = list(sides)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(sides[name]())
            print(f"{section}  round {turn + 1}/{repeats}  {name}: {samples[name][-1]:,.4g}", flush=True)
    return samples


def clean_environment(threads: int | None = None, **variables: str) -> dict[str, str]:
    """Return this environment without what launchers leave in it.

    Args:
        threads: OMP_NUM_THREADS; None to leave it to the program.
        variables: More environment variables.
    """
    left_by_launchers = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "OMP_NUM")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_by_launchers)}
    return environment | variables | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def run(*command: object, threads: int | None = None, watch: Callable[[int], None] | None = None, **variables: str) -> str:
    """Run a program from the project's root and return what it printed.

    Args:
        command: The program and its arguments.
        threads: OMP_NUM_THREADS; None to leave it to the program.
        watch: Called once a second with the process's id, which is also its session's.
        variables: More environment variables.

    Raises:
        SystemExit: It failed; with its last words.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=clean_environment(threads, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=None if watch is None else 1.0)
                break
            except subprocess.TimeoutExpired:
                assert watch is not None
                watch(process.pid)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{output[-3000:]}")
    return output


def python(*command: object, **how: Any) -> str:
    """Run a Python program."""
    return run(sys.executable, *command, **how)


def train(*flags: object, config: str = "", **how: Any) -> tuple[str, dict[str, Any]]:
    """Run scripts/train.py.

    Args:
        flags: Of the command line; with `--data.source` among them.
        config: A file of configs/; it stands before the flags, which would otherwise give way to it.
        how: As for `run`.

    Returns:
        What it printed, and its summary.
    """
    first = ["--config", ROOT / "configs" / config] if config else []
    with tempfile.TemporaryDirectory() as logs:
        output = python(ROOT / "scripts" / "train.py", *first, "--log_dir", logs, *flags, **how)
        summary = json.loads(next(Path(logs).glob("*/*/summary.json")).read_text())
    assert summary["dataset"] in map(str, flags), f"{summary['dataset']} was not asked for"
    return output, summary


def training_speed(*flags: object, **how: Any) -> float:
    """Return images per second in training, the median over the epochs but the first, of synthetic images on the CPU.

    The time is that of the epochs whole, validations left out: with metrics, TensorBoard and checkpoints.
    """
    where = ["--data.source", "synthetic", "--accelerator", "cpu", "--trainer.limit_test_batches", 1]
    return statistics.median(figures(SPEED, train(*flags, *where, **how)[0]))


def figures(pattern: str, output: str) -> list[float]:
    """Return the numbers that a pattern's group finds, without the first: the first epoch warms up."""
    found = [float(text.replace(",", "")) for text in re.findall(pattern, output, re.MULTILINE)]
    if len(found) < 2:
        sys.exit(f"found no {pattern} in:\n{output[-3000:]}")
    return found[1:]


def matmul_gflops(dtype: torch.dtype, size: int = 2048) -> float:
    """Return how fast the CPU multiplies square matrices now, in GFLOP/s; the median of seven."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2e-9 * size**3 / statistics.median(seconds[1:])


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (name := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        model = name[1]
    gpu = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()} if torch.cuda.is_available() else {}
    return {"cpu": model, "cores": os.cpu_count(), **gpu, **versions()}


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    cells = [["section", "what", "medians", "n", "ratio"]]
    for row in rows:
        medians = "  ".join(f"{side} {value:,.4g}" for side, value in row.medians.items())
        count = str(len(next(iter(row.samples.values()))))
        ratio = "" if row.ratio is None else f"{row.ratio[0]} {row.ratio[1]:.3g}"
        cells.append([row.section, row.what, f"{medians}  {row.unit}", count, ratio])
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )

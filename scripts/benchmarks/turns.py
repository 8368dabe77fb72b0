"""Programs that take turns: all alive, one running, for a fraction of a second each.

A shared machine's speed changes from second to second, up to twofold. Programs measured one after another meet different
machines; these meet the same one. Each measures itself by a clock that stands still while others run (clocked.py).
"""

import contextlib
import math
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import ROOT, SPEED, clean_environment

EPOCHS_BESIDE = 3  # one to warm up, one to see how long it takes, and one that is not finished
SLICE = 0.1  # seconds of a turn, on average over the programs
TRAIN = ROOT / "scripts" / "train.py"
CLOCKED = Path(__file__).with_name("clocked.py")


@dataclass
class Program:
    """One side of a comparison.

    Attributes:
        command: A Python script and its arguments; {folder} stands for a folder of its own, removed afterwards.
        pattern: What it prints once an epoch, on a line of its own, with a group around the figure; without a group, the
            figure is the seconds from one such line to the next.
        launcher: Arguments of Python that start the script in other processes; none to start it itself.
        threads: OMP_NUM_THREADS; None to leave it to the program.
        one_core: Whether it stays on one core, which is the same for all; cores are not equally fast while others use them.
        convert: From the figure to the unit of the comparison.
        variables: More environment variables.
    """

    command: list[object]
    pattern: str
    launcher: list[str] = field(default_factory=list)
    threads: int | None = None
    one_core: bool = False
    convert: Callable[[float], float] = float
    variables: dict[str, str] = field(default_factory=dict)


def training(*flags: object, config: str = "", threads: int | None = None) -> Program:
    """Return scripts/train.py on the CPU, on synthetic images but where `flags` name others.

    Its figure is images per second, over an epoch whole but for its validation: with metrics, TensorBoard and checkpoints.
    """
    command: list[object] = [TRAIN, *(["--config", ROOT / "configs" / config] if config else []), "--log_dir", "{folder}"]
    command += ["--accelerator", "cpu", *([] if "--data.source" in flags else ["--data.source", "synthetic"]), *flags]
    return Program(command, SPEED, threads=threads)


class _Live:
    """A program that runs, or is stopped."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.output = program, ""
        self.seconds = 0.0  # that it ran since its last figure
        self.last = 1.0  # and between the two before
        self._read = 0
        clock = folder / "clock"
        clock.write_bytes(struct.pack("q", 0))
        self._clock = clock.open("r+b", buffering=0)
        self._stopped_ns, self._stopped_at = 0, 0
        variables = {"BENCHMARK_CLOCK": str(clock), "TMPDIR": str(folder), **program.variables}
        command = [text.replace("{folder}", str(folder)) for text in map(str, program.command)]
        self._process = subprocess.Popen(
            [sys.executable, *program.launcher, str(CLOCKED), *command],
            cwd=ROOT,
            env=clean_environment(program.threads, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if program.one_core and hasattr(os, "sched_setaffinity"):  # Linux
            os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self._groups = {self._process.pid}

    def run(self, seconds: float = float("inf")) -> float | None:
        """Let it run for some time, or until it says its next figure; return that, or None."""
        began = time.perf_counter()
        if self._stopped_at:
            self._stopped_ns += time.perf_counter_ns() - self._stopped_at
            os.pwrite(self._clock.fileno(), struct.pack("q", self._stopped_ns), 0)
            self._signal(signal.SIGCONT)
        figure = None
        while figure is None and (left := began + seconds - time.perf_counter()) > 0:
            if select.select([self._pipe], [], [], min(left, 60))[0]:
                if not (more := os.read(self._pipe.fileno(), 65536)):
                    sys.exit(f"{' '.join(map(str, self.program.command))} ended too soon:\n{self.output[-3000:]}")
                self.output += more.decode(errors="replace")
                figure = self._next_figure()
        if figure is not None and not self._stopped_at:  # the first: all that it starts has started
            self._find_groups()
        self._stopped_at = time.perf_counter_ns()
        self._signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # until it has
        self.seconds += time.perf_counter() - began
        if figure is not None:
            self.last, self.seconds = self.seconds, 0.0
        return self.program.convert(self.last) if figure is not None and math.isnan(figure) else figure

    @property
    def pid(self) -> int:
        """Of its first process, which is its session's too."""
        return self._process.pid

    def _find_groups(self) -> None:
        """Find the process groups of all that it has started: torchrun gives every rank one of its own."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                parent, group = stat.read_text().rpartition(")")[2].split()[1:3]
                parents[int(stat.parent.name)] = (int(parent), int(group))
        family = {self.pid}
        while more := {pid for pid, (parent, _) in parents.items() if parent in family} - family:
            family |= more
        self._groups |= {parents[pid][1] for pid in family if pid in parents}

    def _signal(self, signum: int) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signum)

    def _next_figure(self) -> float | None:
        found = re.compile(self.program.pattern, re.MULTILINE).search(self.output, self._read)
        if found is None or found.end() == len(self.output):  # of a line that is not whole, the figure may not be
            return None
        self._read = found.end()
        return self.program.convert(float(found[1].replace(",", ""))) if found.groups() else math.nan

    def end(self) -> None:
        """End it, wherever it is."""
        self._find_groups()
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._clock.close()


@contextmanager
def _alive(program: Program) -> Iterator[_Live]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        live = _Live(program, Path(folder))
        try:
            yield live
        finally:
            live.end()


def take_turns(
    section: str,
    programs: dict[str, Program],
    epochs: int,
    starts: int = 1,
    watch: Callable[[str, int], None] = lambda side, session: None,
) -> dict[str, list[float]]:
    """Take a sample of every program in each of `epochs` epochs, after one to warm up, and all that `starts` times.

    In an epoch every program has turns as long as its last epoch took, so that all are done with it at about the same time.

    Args:
        section: What is measured, for the lines printed.
        programs: By side. Each must go on for `EPOCHS_BESIDE` epochs more.
        epochs: Of each start.
        starts: Of every program.
        watch: Called after every epoch with the side and the session of its processes.

    Returns:
        By side, the samples in the order measured.
    """
    samples: dict[str, list[float]] = {side: [] for side in programs}
    for start in range(starts):
        with ExitStack() as stack:
            live = {}
            for side, program in programs.items():
                live[side] = stack.enter_context(_alive(program))
                for _ in ("to warm up", "to see how long it takes"):
                    live[side].run()
            for epoch in range(epochs):
                due = dict(live)
                mean = sum(one.last for one in due.values()) / len(due)
                while due:
                    for side, one in list(due.items()):
                        if (figure := one.run(SLICE * one.last / mean)) is not None:
                            samples[side].append(figure)
                            watch(side, one.pid)
                            del due[side]
                told = ", ".join(f"{side} {values[-1]:,.4g}" for side, values in samples.items())
                print(f"{section}  start {start + 1}/{starts}  epoch {epoch + 1}/{epochs}  {told}", flush=True)
    return samples

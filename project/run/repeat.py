"""The same training, once for each of several seeds, each in a process of its own; and what they come to."""

import ctypes
import fcntl
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from project.errors import UsageError
from project.run.launch import STOPPED
from project.run.outputs import expanded, newest_run
from project.run.repeat_flags import difference, setting_of, settings_of
from project.run.signals import NAMES, SECONDS_TO_SAVE, Stopped, stop_signal
from project.run.storage import write_durably

TRAIN = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
SECONDS_TO_WAIT = 60  # for a run whose repeat.py was killed: it saves, and may have ranks to end
PR_SET_PDEATHSIG = 1  # Source: <linux/prctl.h>
FIGURES = ("test_accuracy", "test_loss", "val_accuracy", "train_seconds")  # of summary.json
HEADS = ("test accuracy", "test loss", "validation accuracy", "seconds")


class Repeats:
    """The runs of one training, `<log_dir>/<name>-seed<S>`, and `<log_dir>/<name>-seeds.json`, what they come to.

    Args:
        flags: Those of train.py.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self.flags, self.settings = list(flags), settings_of(flags)
        self.name, self.log_dir = (setting_of(name, flags) for name in ("name", "log_dir"))
        self.file = expanded(self.log_dir) / f"{self.name}-seeds.json"
        self.seeds: list[int] = []  # of this command and of those before it
        self.heard: list[int] = []  # signals

    @contextmanager
    def held(self) -> Iterator[int]:
        """Be the only one that trains these seeds; yield the descriptor by which the runs, too, hold the lock.

        So a run that has outlived its repeat.py is waited for: none begins beside it.

        Raises:
            UsageError: Another is still at it, or the folder cannot be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = open(self.file.with_name(f".{self.file.name}.lock"), "ab")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise UsageError(f"--log_dir {self.log_dir} cannot be written ({error}); name another folder") from error
        who, begun, said = "another repeat.py of this --name, or a run that it has left", time.monotonic(), False
        with lock:
            while not _locks(lock.fileno()):
                if not said:
                    print(f"waiting, {SECONDS_TO_WAIT} s at most, for {who}", flush=True)
                if time.monotonic() > begun + SECONDS_TO_WAIT:
                    raise UsageError(f"--name {self.name}: {who}, still writes to {self.log_dir}; end it, or name another")
                said = True
                time.sleep(0.1)
            yield lock.fileno()

    def begin(self, seeds: Sequence[int]) -> None:
        """Write the file, with the flags, before any seed is trained.

        Raises:
            UsageError: The name has been trained with other flags, or by something else.
        """
        before = json.loads(self.file.read_text()) if self.file.exists() else {"settings": [], "seeds": []}
        begun = [seed for seed in before["seeds"] if self.run_of(seed)]
        if begun and before["settings"] != self.settings:  # where none has begun, the flags were a mistake, now mended
            how = difference(before["settings"], self.settings)
            raise UsageError(f"{self.file}: its seeds were trained {how}; give the same flags, or another --name")
        for run in (run for seed in seeds if seed not in begun and (run := self.run_of(seed))):
            raise UsageError(f"{run} is there, and {self.file} does not know of it; give another --name, or remove it")
        self.seeds = sorted({*begun, *seeds})
        self.save()

    def train(self, seeds: Sequence[int], places: Sequence[list[str]], lock: int) -> list[str]:
        """Train each seed that has not finished; return of each that failed what happened, and where its output is.

        Args:
            seeds: The seeds.
            places: Of each, the flags that send a run there. Where there are several, each run's output goes to a file.
            lock: The descriptor that the runs hold too.

        Raises:
            SystemExit: The flags of train.py are mistaken, as has been printed.
            Stopped: A signal came, to this process or to a run; the runs have saved and ended.
        """
        waiting = [seed for seed in seeds if not self.figures_of(seed)]
        if len(waiting) < len(seeds):
            print(f"{len(seeds) - len(waiting)} of {len(seeds)} seeds were done before", flush=True)
        for signum in NAMES:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, lambda number, frame: self.heard.append(number))
        stop_signal.uninstall()  # its thread, before processes are forked
        free, to_file, failed = [*places], len(places) > 1, []
        running: dict[int, tuple[subprocess.Popen[bytes], list[str]]] = {}
        try:
            while (waiting or running) and not self.heard:
                while waiting and free:
                    seed, place = waiting.pop(0), free.pop(0)
                    running[seed] = self._start(seed, place, lock, len(places)), place
                time.sleep(0.05)
                for seed, code in [(seed, process.poll()) for seed, (process, _) in running.items()]:
                    if code is None:
                        continue
                    free.append(running.pop(seed)[1])
                    if code in STOPPED:
                        raise Stopped(self.heard[0] if self.heard else abs(code) % 128)
                    if code == 2:
                        if to_file:  # the last line says what is mistaken
                            print(self.output_of(seed).read_text().rstrip().rpartition("\n")[2], file=sys.stderr)
                        sys.exit(2)
                    self.save()
                    end = f"failed, exit code {code}" if code else "is done" if self.figures_of(seed) else "was not tested"
                    end = f"seed {seed} {end}; its output is {f'in {self.output_of(seed)}' if to_file else 'above'}"
                    failed += [end] if code or not self.figures_of(seed) else []
                    print(end, flush=True)
        finally:
            self._end([process for process, _ in running.values()])
        if self.heard:
            raise Stopped(self.heard[0])
        return failed

    def _start(self, seed: int, place: list[str], lock: int, at_once: int) -> "subprocess.Popen[bytes]":
        own = ["--log_dir", self.log_dir, "--name", f"{self.name}-seed{seed}", "--seed", str(seed), "--resume"]
        command, environment = [sys.executable, str(TRAIN), *self.flags, *place, *own], dict(os.environ)
        if "cpu" in place:  # as each would take all cores for itself
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
        output = open(self.output_of(seed), "ab" if self.run_of(seed) else "wb") if at_once > 1 else None  # noqa: SIM115
        try:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                pass_fds=[lock],
                preexec_fn=_follows(os.getpid()),  # noqa: PLW1509 (no other thread runs here; its modules are loaded)
            )
        finally:
            if output:
                output.close()

    def _end(self, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Have runs save and end; those that do not, or all after a second Ctrl-C, are killed."""
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + SECONDS_TO_SAVE + 10
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or self.heard.count(signal.SIGINT) > 1:
                for process in processes:
                    process.kill()
            time.sleep(0.05)

    def run_of(self, seed: int) -> Path | None:
        """Return the run directory of a seed; None where it has not begun."""
        return newest_run(self.log_dir, f"{self.name}-seed{seed}")

    def output_of(self, seed: int) -> Path:
        """Return the file for a run's output, where it is not shown."""
        return Path(str(self.file).removesuffix("s.json") + f"{seed}.txt")

    def figures_of(self, seed: int) -> dict[str, Any]:
        """Return what a seed has come to; nothing where it has not finished, or was not tested."""
        file = (self.run_of(seed) or self.file) / "summary.json"
        summary = json.loads(file.read_text()) if file.exists() else {}
        return {name: summary[name] for name in FIGURES} if summary.get("test_accuracy") is not None else {}

    def save(self) -> dict[str, Any]:
        """Write and return the figures of each seed that has finished; of each figure mean, sample deviation (n - 1), n."""
        runs = {seed: figures for seed in self.seeds if (figures := self.figures_of(seed))}
        values = {name: [run[name] for run in runs.values() if run[name] is not None] for name in FIGURES}
        results = {
            "settings": self.settings,
            "seeds": self.seeds,
            "runs": runs,
            "mean": {name: statistics.mean(of) if of else None for name, of in values.items()},
            "standard_deviation": {name: _deviation(of) for name, of in values.items()},
            "n": {name: len(of) for name, of in values.items()},
        }
        write_durably(self.file, lambda file: file.write(json.dumps(results, indent=2).encode() + b"\n"))
        return results

    def table(self) -> list[str]:
        """Return the file in lines."""
        results = self.save()
        lines = ["  ".join(["seed     ", *HEADS])]
        for label, figures in {
            **results["runs"],
            "mean": results["mean"],
            "deviation": results["standard_deviation"],
        }.items():
            cells = [
                "-" if figures[name] is None else f"{figures[name]:,.{1 if name == 'train_seconds' else 4}f}"
                for name in FIGURES
            ]
            lines.append(
                "  ".join([f"{label:<9}", *(cell.rjust(len(head)) for cell, head in zip(cells, HEADS, strict=True))])
            )
        return [*lines[:-1], f"{lines[-1]}   (n = {len(results['runs'])})", f"saved  {self.file}"]


def _locks(descriptor: int) -> bool:
    """Lock an open file, if nobody else has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _follows(parent: int) -> Callable[[], None]:
    """Return what a child calls before it runs, so that it is asked to save and end when its parent is gone."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def follow() -> None:
        if libc is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until exec, it would be heard by the parent's handler, and lost
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it was gone before
                os._exit(1)

    return follow


def _deviation(values: Sequence[float]) -> float | None:
    """Return the sample's standard deviation (n - 1); None of one value, or where one is not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None

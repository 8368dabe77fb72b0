"""A command in processes of its own, to be killed, stopped and looked at."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ROOT, clean_environment

# Small images and a narrow network: some hundred steps a second. Every step is written to TensorBoard.
FLAGS = ["--data.source", "synthetic", "--data.image_size", "8", "--data.shift", "2", "--data.eval_batch_size", "100"]
FLAGS += ["--model.network.channels", "[4,4,8,8,8,8]", "--model.network.hidden", "16", "--model.network.dropout", "0.2"]
FLAGS += ["--accelerator", "cpu", "--trainer.log_every_n_steps", "1", "--trainer.limit_val_batches", "2"]
RUN = Path("logs", "default", "version_0")
TWO = ["--strategy", "ddp", "--devices", "2"]


class Command:
    """`python scripts/train.py` in a process group of its own, its output in a file.

    Args:
        place: The folder that it runs in.
        flags: Its flags.
        program: What takes them, after Python, instead of the script.
        env: Environment variables.
    """

    def __init__(self, place: Path, *flags: object, program: list[str] | None = None, **env: str) -> None:
        self.place = place
        self.output_file = place / "output.txt"
        with open(self.output_file, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *(program or [str(ROOT / "scripts" / "train.py")]), *map(str, flags)],
                cwd=place,
                env=clean_environment(**env),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.members():
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def members(self) -> list[int]:
        """The processes of the group that are alive."""
        alive = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.pid and fields[0] != "Z":
                alive.append(int(stat.parent.name))
        return sorted(alive)

    def rank(self, number: int, attempt: int = 0) -> int:
        """The process of a rank, of those that a launcher has started at one attempt; waits for it."""
        marks = {f"LOCAL_RANK={number}".encode(), f"TORCHELASTIC_RESTART_COUNT={attempt}".encode()}

        def find() -> int | None:
            for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):  # torchrun gives each a group of its own
                try:
                    if Path(f"/proc/{pid}/cwd").resolve() != self.place.resolve():
                        continue
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if marks <= {*environment}:
                    return pid
            return None

        return wait_for(find, 60)

    def wait(self, seconds: float = 240) -> int:
        """Wait for the end; return the exit code as a shell shows it, and fail if a process is left."""
        code = self.process.wait(seconds)
        wait_for(lambda: not self.members(), 15)
        return 128 - code if code < 0 else code

    def steps(self) -> int:
        """Wait until the run has saved a checkpoint; return its steps."""
        return wait_for(lambda: steps_saved(self.place) if self.process.poll() is None else -1, 60)


def wait_for(found: Callable[[], Any], seconds: float, pause: float = 0.02) -> Any:
    """Wait until a function returns something true."""
    end = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(pause)
    return result


def checkpoints(place: Path) -> dict[str, dict]:
    """Every checkpoint of the run, loaded."""
    files = sorted((place / RUN / "checkpoints").glob("*.ckpt"))
    return {file.name: torch.load(file, weights_only=True) for file in files}


def steps_saved(place: Path) -> int:
    last = place / RUN / "checkpoints" / "last.ckpt"
    return torch.load(last, weights_only=True)["global_step"] if last.exists() else 0


def left_over(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.name.endswith(".tmp")]


def steps_in_tensorboard(place: Path, tag: str = "train/loss") -> list[int]:
    """The steps of a scalar in all event files, as they lie there: none merged, none hidden."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return sorted(
        event.step
        for file in (place / RUN).glob("events.*")
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == tag
    )


def largest_difference(one: Path, other: Path) -> float:
    first, second = (checkpoints(place)["last.ckpt"] for place in (one, other))
    assert first["global_step"] == second["global_step"]
    weights, others = first["state_dict"], second["state_dict"]
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)

"""Runs that are killed, stopped, or fail: real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT, clean_environment, python, train
from tests.survival import (
    FLAGS,
    RUN,
    TWO,
    Command,
    checkpoints,
    largest_difference,
    left_over,
    steps_in_tensorboard,
    steps_saved,
    wait_for,
)

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc, as Linux has it"),
    pytest.mark.alone,
]
EPOCHS = 12  # of 84 steps
LONG = [*FLAGS, "--max_epochs", EPOCHS, "--checkpoint_every", 3]
DEVICES = {"one process": [], "two processes": TWO}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--data.cache_dir", str(tmp_path_factory.mktemp("cache"))]


@dataclass
class Whole:
    """The uninterrupted run, and how long this machine takes for it.

    Attributes:
        place: The folder that it ran in.
        start: Seconds from the command to its first checkpoint.
        rest: Seconds from there to its end.
    """

    place: Path
    start: float
    rest: float

    def any_moment(self, draw: random.Random, share: float) -> float:
        """Draw seconds after which a run is ended: in its start, or at most this share of the rest after it."""
        return draw.uniform(0.5, self.start + share * self.rest)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: list[str]) -> dict[str, Whole]:
    """The uninterrupted run, on one process and on two."""
    runs = {}
    for name, devices in DEVICES.items():
        place, begun = tmp_path_factory.mktemp("whole"), time.monotonic()
        with Command(place, *LONG, *devices, *cache) as command:
            command.steps()
            start = time.monotonic() - begun
            assert command.wait() == 0, command.output
        runs[name] = Whole(place, start, time.monotonic() - begun - start)
    return runs


def assert_same_run(place: Path, whole: Path) -> None:
    assert largest_difference(place, whole) == 0
    for tag in ("train/loss", "learning_rate"):
        assert steps_in_tensorboard(place, tag) == list(range(84 * EPOCHS)), tag
    assert steps_in_tensorboard(place, "val/accuracy") == [84 * epoch - 1 for epoch in range(1, EPOCHS + 1)]
    assert left_over(place) == []


# ---- kill -9


@pytest.fixture
def other_file_system() -> Iterator[str]:
    """A folder for temporary files that lies on another file system than the runs."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm, which is always another file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def stop_in_the_write(command: Command, folder: Path) -> None:
    """Have the processes stand still while a checkpoint is half written."""

    def half_written() -> bool:
        return any(path.name.endswith(".tmp") for path in folder.iterdir())

    while True:
        wait_for(half_written, 60, pause=0)
        os.killpg(command.pid, signal.SIGSTOP)
        time.sleep(0.02)  # until it has stopped
        if half_written():
            return
        os.killpg(command.pid, signal.SIGCONT)  # it was quicker


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_killed_twenty_times_it_ends_with_the_weights_of_an_uninterrupted_run(
    devices: str, whole: dict[str, Whole], tmp_path: Path, cache: list[str], other_file_system: str
) -> None:
    """The whole group at once: half of the times at any moment, half in the middle of writing a checkpoint.

    The ten moments use up half of the run at most, whatever the machine's speed, and the ten writes some steps each.
    """
    draw, in_the_write = random.Random(len(devices)), 0
    folder = tmp_path / RUN / "checkpoints"
    for number in range(20):
        with Command(tmp_path, *LONG, *DEVICES[devices], *cache, "--resume", TMPDIR=other_file_system) as command:
            if number % 2:
                before = steps_saved(tmp_path)
                wait_for(lambda before=before: steps_saved(tmp_path) > before, 60)
                time.sleep(draw.uniform(0, 0.01 * whole[devices].rest))
                stop_in_the_write(command, folder)
            else:
                time.sleep(whole[devices].any_moment(draw, 0.05))
            assert command.process.poll() is None, command.output
        in_the_write += bool(left_over(tmp_path))
        checkpoints(tmp_path)  # each of them loads
    print(f"{in_the_write} of 20 left a file half written; {steps_saved(tmp_path)} steps done by then")
    assert in_the_write >= 5
    with Command(tmp_path, *LONG, *DEVICES[devices], *cache, "--resume") as command:
        assert command.wait() == 0, command.output
    assert [path.name for path in (tmp_path / RUN).parent.iterdir()] == ["version_0"]
    assert_same_run(tmp_path, whole[devices].place)


# ---- SIGTERM and SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the parent", "the group", "rank 1 only"])
def test_sigterm_at_any_moment_saves_and_exits_with_143(
    whom: str, whole: dict[str, Whole], tmp_path: Path, cache: list[str]
) -> None:
    """Half of the times at any moment from the start on, half while it trains."""
    draw, slowest, uninterrupted = random.Random(whom), 0.0, whole["two processes"]
    for number in range(7):  # of 21 in all
        with Command(tmp_path, *LONG, *TWO, *cache, "--resume") as command:
            target = command.rank(1) if whom == "rank 1 only" else command.pid
            if number % 2:
                steps = steps_saved(tmp_path)
                wait_for(lambda steps=steps: steps_saved(tmp_path) > steps, 60)
                time.sleep(draw.uniform(0, 0.07 * uninterrupted.rest))
            else:
                time.sleep(uninterrupted.any_moment(draw, 0.1))
            assert command.process.poll() is None, command.output
            before = time.monotonic()
            (os.killpg if whom == "the group" else os.kill)(target, signal.SIGTERM)
            assert command.wait(30) == 143, command.output
            slowest = max(slowest, time.monotonic() - before)
            assert "Traceback" not in command.output
            checkpoints(tmp_path)
    print(f"slowest exit {slowest:.1f} s; {steps_saved(tmp_path)} steps done by then")
    assert steps_saved(tmp_path) > 6
    with Command(tmp_path, *LONG, *TWO, *cache, "--resume") as command:
        assert command.wait() == 0, command.output
    assert_same_run(tmp_path, uninterrupted.place)


def test_sigterm_saves_the_very_step_and_the_shell_goes_no_further(tmp_path: Path, cache: list[str]) -> None:
    """One process, without --checkpoint_every."""
    with Command(tmp_path, *FLAGS, "--max_epochs", 200, *cache) as command:
        wait_for(lambda: "epoch 2/" in command.output, 60)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(30) == 143
        steps = steps_in_tensorboard(tmp_path)
        assert f"SIGTERM: stopped after step {steps_saved(tmp_path)}, saved {RUN}/checkpoints/last.ckpt" in command.output
        assert steps == list(range(steps_saved(tmp_path)))


@pytest.mark.slow
def test_sigterm_to_the_group_leaves_the_workers_of_data_loaders_to_the_run(tmp_path: Path, cache: list[str]) -> None:
    with Command(tmp_path, *FLAGS, "--max_epochs", 200, *cache, "--data.num_workers", 2) as command:
        wait_for(lambda: "epoch 2/" in command.output, 60)
        os.killpg(command.pid, signal.SIGTERM)
        assert command.wait(30) == 143, command.output
        assert command.output.splitlines()[-1].endswith(f"go on with --resume {RUN}")
        assert steps_in_tensorboard(tmp_path) == list(range(steps_saved(tmp_path)))


@pytest.mark.slow
def test_restarted_by_torchrun_it_goes_on_by_itself(tmp_path: Path, cache: list[str]) -> None:
    """A rank is killed once, at step 5, when step 3 is saved."""
    flags = [*FLAGS, *cache, "--strategy", "ddp", "--devices", "2", "--max_epochs", "1", "--checkpoint_every", "3"]
    for name in ("whole", "restarted"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", *flags)
    (tmp_path / "restarted" / RUN).mkdir(parents=True)  # another run of the name, which is not this job's
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1", "--standalone"]
    result = python(
        *(*torchrun, ROOT / "scripts" / "train.py", *flags, *failing("kill once")),
        cwd=tmp_path / "restarted",
        TMPDIR=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("resume: from step 3, logs/default/version_1/checkpoints/last.ckpt") == 1
    assert [run.name for run in sorted((tmp_path / "restarted" / RUN).parent.iterdir())] == ["version_0", "version_1"]
    whole, restarted = (
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)
        for run in ("whole" / RUN, "restarted" / RUN.with_name("version_1"))
    )
    assert all(torch.equal(weight, restarted["state_dict"][name]) for name, weight in whole["state_dict"].items())


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
def test_ctrl_c_saves_and_exits_with_130_and_a_second_one_stops_at_once(
    devices: str, tmp_path: Path, cache: list[str]
) -> None:
    flags = [*FLAGS, "--max_epochs", 2000, *DEVICES[devices], *cache]
    with Command(tmp_path, *flags) as command:
        wait_for(lambda: "epoch 2/" in command.output, 60)
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does
        assert command.wait(30) == 130
        assert command.output.splitlines()[-1].endswith(f"go on with --resume {RUN}")
    assert steps_in_tensorboard(tmp_path) == list(range(steps_saved(tmp_path)))
    rank = len(DEVICES[devices]) // 4  # the last
    with Command(tmp_path, *flags, "--name", "hanging", *failing("hang", rank)) as command:
        wait_for(lambda: "hanging at step" in command.output, 60)
        os.killpg(command.pid, signal.SIGINT)
        time.sleep(2)
        assert command.process.poll() is None  # it waits for the step to end
        os.killpg(command.pid, signal.SIGINT)
        before = time.monotonic()
        assert command.wait(30) == 130
        assert time.monotonic() - before < 5
        assert "Traceback" not in command.output


# ---- failures


FAILURES = {
    "raise": "ZeroDivisionError: rank fails in its step",
    "data": "FileNotFoundError: an image is gone",
    "exit": "SystemExit: 0",
    "vanish": "rank 1 left before the end, with exit code 0",
    "kill": "rank 1 was ended by SIGKILL",
}


def failing(how: str, rank: int = 1) -> list[object]:
    callback = "--trainer.callbacks"
    return [callback, "tests.programs.failing.Fail", f"{callback}.how", how, f"{callback}.rank", rank]


@pytest.mark.parametrize("how", [how if how == "raise" else pytest.param(how, marks=pytest.mark.slow) for how in FAILURES])
def test_the_first_cause_is_the_last_thing_printed(how: str, tmp_path: Path, cache: list[str]) -> None:
    with Command(tmp_path, *FLAGS, *TWO, *cache, "--checkpoint_every", 3, *failing(how)) as command:
        assert command.wait(60) == 1, command.output
        words = command.output.rstrip()
        assert FAILURES[how] in words.splitlines()[-1]
        assert "rank 1" in words
        assert words.count("Traceback") == (how in ("raise", "data", "exit"))
    if how != "data":  # that fails before the first step
        assert checkpoints(tmp_path)["last.ckpt"]["global_step"] == 3
        events = EventAccumulator(str(tmp_path / RUN)).Reload()
        assert [event.step for event in events.Scalars("train/loss")][:3] == [0, 1, 2]


@pytest.mark.slow
def test_a_mistake_that_only_one_rank_meets_is_one_line_with_its_rank(tmp_path: Path, cache: list[str]) -> None:
    with Command(tmp_path, *FLAGS, *TWO, *cache, *failing("mistake")) as command:
        assert command.wait(60) == 2
        assert command.output.splitlines()[-1] == "error on rank 1: --data.root is not on this machine"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the parent", "rank 0", "rank 1"])
def test_kill_9_of_any_process_ends_all_within_30_seconds(victim: str, tmp_path: Path, cache: list[str]) -> None:
    with Command(tmp_path, *FLAGS, *TWO, *cache, "--max_epochs", 2000, "--data.num_workers", 1) as command:
        wait_for(lambda: "epoch 2/" in command.output, 60)
        os.kill(command.pid if victim == "the parent" else command.rank(int(victim[-1])), signal.SIGKILL)
        before = time.monotonic()
        assert command.wait(30) == (137 if victim == "the parent" else 1)
        assert time.monotonic() - before < 30
        if victim == "the parent":
            assert "the process that started this rank is gone" in command.output.splitlines()[-1]
        else:
            assert f"{victim} was ended by SIGKILL" in command.output.splitlines()[-1]
    assert len(EventAccumulator(str(tmp_path / RUN)).Reload().Scalars("train/loss")) > 84


def test_when_the_launcher_is_gone_rank_0_says_so_before_the_others_leave(tmp_path: Path) -> None:
    """A rank that left first would end rank 0 by a broken collective, silently."""
    said = tmp_path / "stderr"
    command = [sys.executable, str(ROOT / "tests" / "programs" / "orphans.py")]
    with said.open("w") as errors:
        launcher = subprocess.Popen(
            command, env=clean_environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    with launcher:
        assert launcher.stdout is not None
        processes = dict(map(int, launcher.stdout.readline().split()) for _ in range(2))
    ended: dict[int, float] = {}

    def look() -> bool:
        ended.update({r: time.monotonic() for r, pid in processes.items() if r not in ended and not runs(pid)})
        return len(ended) == 2

    wait_for(look, 20)
    assert ended[1] - ended[0] > 0.4
    assert said.read_text() == "error: the process that started this rank is gone\n"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Two hosts with addresses of their own, a torchrun on each: what a run on several machines comes to."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, clean_environment, train
from tests.hosts import ADDRESSES, TwoHosts, cannot
from tests.survival import FLAGS, RUN, steps_in_tensorboard, steps_saved, wait_for

REASON = cannot()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
PRECISE = [*FLAGS, "--precision", "64-true"]  # see the recipes in test_train.py


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as two:
        yield two


class OnHost:
    """The command on one of them, by torchrun, in a process group of its own; its output in a file.

    Args:
        host: 0 or 1.
        place: The folder that both share.
        torchrun: Its flags.
        flags: Of scripts/train.py.
    """

    def __init__(self, host: int, place: Path, torchrun: list[str], *flags: object) -> None:
        self.file = place / f"host{host}-{time.monotonic_ns()}.txt"
        program = [*TwoHosts.on(host), sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *torchrun]
        script = [ROOT / "scripts" / "train.py", "--strategy", "ddp", *flags]
        with open(self.file, "wb") as output:
            self.process = subprocess.Popen(
                [*program, *map(str, script)],
                cwd=place,
                env=clean_environment(TMPDIR=str(place)),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "OnHost":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End torchrun and what it has started, at once: each of its ranks is a session of its own."""
        pids = [self.process.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")


def static(host: int) -> list[str]:
    """Two machines that are named beforehand; their own network, so that any port is free."""
    return ["--nnodes=2", f"--node_rank={host}", f"--master_addr={ADDRESSES[0]}", "--master_port=29500"]


def weights(place: Path) -> dict[str, torch.Tensor]:
    return torch.load(place / RUN / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_two_hosts_train_one_run_as_one_process_would(hosts: TwoHosts, tmp_path: Path) -> None:
    flags = [*PRECISE, "--max_epochs", 2]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    train(tmp_path / "one", *flags)
    place = tmp_path / "two"
    with OnHost(0, place, static(0), *flags) as first, OnHost(1, place, static(1), *flags) as second:
        assert (first.process.wait(180), second.process.wait(30)) == (0, 0), first.output + second.output
    assert [run.name for run in (place / RUN).parent.iterdir()] == ["version_0"]
    assert "on 2 x cpu (ddp)" in first.output
    assert difference(place, tmp_path / "one") < 1e-6
    figures = json.loads((place / RUN / "summary.json").read_text())
    assert figures["world_size"] == 2
    assert figures["num_test_images_counted"] == 2000


def test_a_pulled_cable_ends_both_in_time_and_the_same_commands_go_on(hosts: TwoHosts, tmp_path: Path) -> None:
    flags = [*FLAGS, "--max_epochs", 6, "--checkpoint_every", 10, "--resume"]
    for name in ("whole", "pulled"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", "--strategy", "ddp", "--devices", 2, *flags)
    place, timed = tmp_path / "pulled", [*flags, "--timeout", 8]
    with OnHost(0, place, static(0), *timed) as first, OnHost(1, place, static(1), *timed) as second:
        wait_for(lambda: "epoch 2/6" in first.output, 120)
        hosts.pull()
        before = time.monotonic()
        assert (first.process.wait(40), second.process.wait(40)) == (1, 1)
        assert time.monotonic() - before < 30
        for output, rank in ((first.output, ""), (second.output, " on rank 1")):
            line = next(line for line in output.splitlines() if line.startswith("error"))
            assert line.startswith(f"error{rank}: the other ranks do not answer (")
            assert f"{ADDRESSES[0]} port " in line
    assert 84 < steps_saved(place) < 6 * 84
    hosts.plug_in()
    with OnHost(0, place, static(0), *timed) as first, OnHost(1, place, static(1), *timed) as second:
        assert (first.process.wait(180), second.process.wait(30)) == (0, 0), first.output + second.output
    assert difference(place, tmp_path / "whole") == 0
    assert [run.name for run in (place / RUN).parent.iterdir()] == ["version_0"]
    assert steps_in_tensorboard(place) == list(range(6 * 84))

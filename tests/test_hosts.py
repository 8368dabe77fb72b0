"""Two hosts with addresses of their own, a torchrun on each: what a run on several machines comes to."""

import contextlib
import json
import os
import re
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
from tests.test_train import IN_FLOAT32

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
        env: Environment variables.
    """

    def __init__(self, host: int, place: Path, torchrun: list[str], *flags: object, **env: str) -> None:
        self.file = place / f"host{host}-{time.monotonic_ns()}.txt"
        program = [*TwoHosts.on(host), sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *torchrun]
        script = [ROOT / "scripts" / "train.py", "--strategy", "ddp", *flags]
        with open(self.file, "wb") as output:
            self.process = subprocess.Popen(
                [*program, *map(str, script)],
                cwd=place,
                env=clean_environment(TMPDIR=str(place), **env),
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


ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or a machine that joins would not find the others (torch 2.14)


def elastic(host: int) -> list[str]:
    """One machine or two, as they come and go; it takes some seconds to see that one has gone."""
    # is_host: which of them keeps the rendezvous' store; torchrun would know it by the host's name, which both share here.
    how = f"last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10,is_host={1 - host}"
    where = [f"--rdzv_endpoint={ADDRESSES[0]}:29500", f"--local_addr={ADDRESSES[host]}", "--rdzv_id=job"]
    return ["--nnodes=1:2", "--max-restarts=3", "--rdzv_backend=c10d", *where, f"--rdzv_conf={how}"]


def test_a_machine_goes_and_comes_back_and_the_run_is_the_same(hosts: TwoHosts, tmp_path: Path) -> None:
    """By the gentle recipe: after forty epochs of the default one, rounding alone makes 0.4 in float64, too (measured)."""
    epochs = 24
    flags = [*PRECISE, *IN_FLOAT32, "--max_epochs", epochs, "--checkpoint_every", 10]
    for name in ("whole", "elastic"):
        (tmp_path / name).mkdir()
    place, timed = tmp_path / "elastic", [*flags, "--timeout", 20]

    def epoch() -> int:
        return max([0, *map(int, re.findall(r"^epoch (\d+)/", first.output, re.MULTILINE))])

    def comes_to(more: int) -> None:
        """Wait for some epochs more."""
        until = epoch() + more
        wait_for(lambda: epoch() >= until or first.process.poll() is not None, 120, 0.2)
        assert first.process.poll() is None, first.output

    with OnHost(0, place, elastic(0), *timed, **ELASTIC) as first:
        with OnHost(1, place, elastic(1), *timed, **ELASTIC):
            comes_to(2)
        # Its machine is lost: torchrun and its rank were killed.
        comes_to(2)
        assert first.output.count("resume: from step") == 1
        with OnHost(1, place, elastic(1), *timed, **ELASTIC) as second:
            wait_for(lambda: (first.output + second.output).count("resume: from step") == 2, 60)
            assert (first.process.wait(240), second.process.wait(60)) == (0, 0), first.output + second.output
            assert "on 2 x cpu (ddp)" in first.output + second.output
    train(tmp_path / "whole", *flags)
    assert difference(place, tmp_path / "whole") < 1e-6
    assert [run.name for run in (place / RUN).parent.iterdir()] == ["version_0"]
    assert steps_in_tensorboard(place) == list(range(epochs * 84))

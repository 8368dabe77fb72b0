"""Ranks that torchrun or Slurm has started: what is taken from them, and what contradicts them."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

from project.errors import UsageError
from project.run.checks import check_hardware
from project.run.cluster import Layout, as_launched, check_launched, choose_network, layout
from tests.conftest import ROOT, python, train
from tests.survival import FLAGS, RUN, Command, steps_saved, wait_for

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "0",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The environment of a rank that another launcher has started."""
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launched", [TORCHRUN, SLURM], indirect=True)
def test_devices_and_machines_are_the_launchers_where_they_are_not_given(launched: None) -> None:
    assert as_launched("auto", 1, "ddp") == (2, 2)
    assert as_launched(2, 2, "ddp") == (2, 2)
    check_launched(check_hardware("cpu", 2, "auto", 2))


CONTRADICTIONS = [
    ((4, "ddp", 2), r"--devices 4: (torchrun|srun) has started 2 processes on this machine; leave --devices out, or give"),
    ((2, "ddp", 3), r"--num_nodes 3: (torchrun|srun) has started processes on 2; leave --num_nodes out, or give"),
    ((1, "dp", 1), r"--strategy dp is one process, and (torchrun|srun) has started 4; use --strategy ddp"),
]


@pytest.mark.parametrize("launched", [TORCHRUN, SLURM], indirect=True)
@pytest.mark.parametrize(("flags", "message"), CONTRADICTIONS)
def test_what_contradicts_the_launcher_is_one_line(launched: None, flags: tuple[int, str, int], message: str) -> None:
    devices, strategy, num_nodes = flags
    devices, num_nodes = as_launched(devices, num_nodes, strategy)  # type: ignore[assignment]
    if strategy == "dp":
        num_nodes = 1  # what it says of several machines is another check's
    with pytest.raises(UsageError, match=message):
        check_launched(check_hardware("cpu", devices, strategy, num_nodes))


@pytest.mark.parametrize(
    ("launched", "message"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "3"}, "torchrun has started 3 processes on 2 machines, and here 2; every machine needs"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": ""}, None),
        ({name: value for name, value in SLURM.items() if "STEP" not in name}, "this job has 4 tasks, and none was started"),
        ({name: value for name, value in SLURM.items() if "PER_NODE" not in name}, "--ntasks=4 leaves open which machine"),
        ({**SLURM, "SLURM_NTASKS": "3"}, "srun has started 3 processes on 2 machines"),
    ],
    indirect=["launched"],
)
def test_ranks_that_are_not_alike_on_every_machine_are_refused(launched: None, message: str | None) -> None:
    if message is None:
        assert layout() == Layout("srun", 2, 2)
    else:
        with pytest.raises(UsageError, match=message):
            layout()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo finds the network by itself, or is told")
def test_gloo_takes_the_network_that_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    choose_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_network()
    assert os.environ["GLOO_SOCKET_IFNAME"] == next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


# ---- real launchers


def by(launcher: str, *flags: object) -> list[object]:
    return ["-m", launcher, *flags, ROOT / "scripts" / "train.py", "--strategy", "ddp", *FLAGS]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--data.cache_dir", str(tmp_path_factory.mktemp("cache"))]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "torch.distributed.launch"])
def test_a_launcher_says_how_many_processes_there_are(launcher: str, tmp_path: Path, cache: list[str]) -> None:
    few = [*cache, "--max_epochs", 1, "--trainer.limit_train_batches", 4, "--trainer.limit_test_batches", 1]
    result = python(*by(launcher, "--nproc_per_node=2", "--standalone"), *few, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "trained   1 epochs, 4 steps of 64 images on 2 x cpu (ddp)" in result.stdout
    assert [run.name for run in (tmp_path / RUN).parent.iterdir()] == ["version_0"]


def weights(place: Path) -> dict[str, torch.Tensor]:
    return torch.load(place / RUN / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(0, 1, 0), (1, 1)], ids=["three times", "twice"])
def test_killed_again_and_again_torchrun_brings_it_to_the_same_end(
    victims: tuple[int, ...], tmp_path: Path, cache: list[str]
) -> None:
    flags = [*cache, "--max_epochs", 6, "--checkpoint_every", 10]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", "--strategy", "ddp", "--devices", 2, *FLAGS, *flags)
    place, torchrun = tmp_path / "killed", ["--nproc_per_node=2", "--max-restarts=3", "--standalone"]
    program = [str(argument) for argument in by("torch.distributed.run", *torchrun)]
    with Command(place, *flags, program=program, TMPDIR=str(tmp_path)) as command:
        before = 0
        for attempt, victim in enumerate(victims):
            before = wait_for(lambda before=before: max(0, steps_saved(place) - before - 60), 90) + before + 60
            os.kill(command.rank(victim, attempt), signal.SIGKILL)
        assert command.wait(240) == 0, command.output[-3000:]
    assert command.output.count("resume: from step ") == len(victims)
    expected, found = weights(tmp_path / "whole"), weights(place)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())

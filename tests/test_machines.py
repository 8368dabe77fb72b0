"""Several machines without a launcher: the same command on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK."""

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import ImageFolder
from tests.survival import FLAGS, RUN, Command, steps_saved, wait_for

TWO_MACHINES = ["--strategy", "ddp", "--num_nodes", "2", "--devices", "1"]
SMALL = [*FLAGS, *TWO_MACHINES, "--max_epochs", "1"]


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@contextlib.contextmanager
def machines(place: Path, *flags: list[object]) -> Iterator[list[Command]]:
    """A command on each, with a disk of its own.

    Args:
        place: Holds the disks.
        flags: Of each.
    """
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TMPDIR": str(place)}
    with contextlib.ExitStack() as stack:
        commands = []
        for number, own in enumerate(flags):
            disk = place / f"machine{number}"
            disk.mkdir(exist_ok=True)
            commands.append(stack.enter_context(Command(disk, *own, NODE_RANK=str(number), **where)))
        yield commands


def test_machines_whose_images_differ_say_so_before_they_train(image_folder: ImageFolder, tmp_path: Path) -> None:
    ours = ["--data.source", "folder", "--batch_size", "4", "--data.val_fraction", "0"]
    roots = [image_folder(train=[8, 8], test=[2, 2], seed=seed) for seed in (0, 1)]
    flags = [[*SMALL, *ours, "--data.root", root] for root in roots]
    with machines(tmp_path, *flags) as both:
        assert [command.wait(60) for command in both] == [2, 2], both[0].output + both[1].output
    host = socket.gethostname()
    for command, root, rank in zip(both, roots, ("", " on rank 1"), strict=True):
        assert command.output.splitlines()[-1] == (
            f"error{rank}: --data.root {root}: the images, or the names of their classes, are not the same on all machines:"
            f" rank 1 on {host} has others than rank 0 on {host}; give every machine the same copy"
        )
        assert "Traceback" not in command.output
    assert not (both[0].place / RUN).exists()
    assert not (both[1].place / "logs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_a_machine_that_does_not_come_ends_the_command_in_time(alone: int, tmp_path: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": str(alone)}
    before = time.monotonic()
    with Command(tmp_path, *SMALL, "--timeout", 6, **where) as command:
        assert command.wait(60) == 1, command.output
    assert time.monotonic() - before < 30
    *_, last = command.output.splitlines()
    assert last.startswith("error"), command.output
    assert "the other ranks do not answer" in last
    assert f"127.0.0.1 port {where['MASTER_PORT']}" in last
    assert "Traceback" not in command.output


@pytest.mark.slow
def test_machines_with_disks_of_their_own_train_one_run_and_say_what_they_lack_to_go_on(tmp_path: Path) -> None:
    stale = tmp_path / "machine1" / RUN / "checkpoints" / "best.ckpt"  # of a run of its own that was there before
    stale.parent.mkdir(parents=True)
    torch.save({"state_dict": {}}, stale)
    with machines(tmp_path, SMALL, SMALL) as both:
        assert [command.wait(120) for command in both] == [0, 0], both[0].output + both[1].output
    assert [path for path in (tmp_path / "machine1" / "logs").rglob("*") if path.is_file()] == [stale]
    shutil.rmtree(tmp_path / "machine1" / "logs")
    assert [output.count("preparing synthetic images") for output in (both[0].output, both[1].output)] == [1, 1]
    assert (both[0].place / RUN / "summary.json").exists()
    more = [*SMALL, "--max_epochs", 2, "--resume"]
    with machines(tmp_path, more, more) as both:
        codes = [command.wait(60) for command in both]
    assert codes == [2, 2]
    said = (
        f"error on rank 1: --resume {RUN} is not there, on {socket.gethostname()}; give a run directory or a .ckpt file,"
        " or --resume alone; several machines need it on a disk that all see, or a copy each"
    )
    for command in both:  # the machine that has it ends too, and says why
        assert command.output.splitlines()[-1] == said
        assert "Traceback" not in command.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_what_failed_on_one_machine_is_said_on_all(victim: int, tmp_path: Path) -> None:
    """The rank of the other only misses it, and would say so first."""
    flags = [*SMALL, "--max_epochs", 200, "--checkpoint_every", 10, "--data.cache_dir", tmp_path / "cache"]
    with machines(tmp_path, flags, flags) as both:
        wait_for(lambda: steps_saved(both[0].place), 90)
        os.kill(both[victim].rank(0, 0), signal.SIGKILL)
        assert [command.wait(40) for command in both] == [1, 1]
    for command in both:
        assert command.output.splitlines()[-1] == (
            f"error: rank {victim} was ended by SIGKILL (out of memory?), and the run with it"
        ), command.output


@pytest.mark.slow
def test_a_machine_that_stands_still_keeps_no_other(tmp_path: Path) -> None:
    """All of the first machine's processes are stopped, its store among them."""
    flags = [*SMALL, "--max_epochs", 200, "--checkpoint_every", 10, "--timeout", 6, "--data.cache_dir", tmp_path / "cache"]
    with machines(tmp_path, flags, flags) as both:
        wait_for(lambda: steps_saved(both[0].place), 90)
        os.killpg(both[0].pid, signal.SIGSTOP)
        before = time.monotonic()
        assert both[1].wait(60) == 1, both[1].output
        assert time.monotonic() - before < 30
    *_, last = both[1].output.splitlines()
    assert "the other ranks do not answer" in last
    assert "127.0.0.1 port " in last

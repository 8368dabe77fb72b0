"""What several processes see and compute, beside what test_train.py says of the weights: whole commands."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, python, train
from tests.survival import FLAGS, RUN, TWO, Command, checkpoints, left_over, steps_in_tensorboard, wait_for

ONCE = [*FLAGS, "--trainer.limit_test_batches", "1"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--data.cache_dir", str(tmp_path_factory.mktemp("cache"))]


Images = dict[tuple[int, int], int]  # by epoch and position: what the augmented image looks like


class Seen:
    """What the ranks of a run of two epochs saw.

    Attributes:
        images: For each rank.
        order: The positions in the order of the first rank.
        splits: For each rank, the positions of "train" and "val".
    """

    def __init__(self, place: Path, devices: int, *flags: object) -> None:
        place.mkdir(exist_ok=True)
        callback = ["--trainer.callbacks", "tests.programs.seen.Seen", "--trainer.callbacks.folder", place]
        launch = ["--strategy", "ddp", "--devices", devices] if devices > 1 else []
        train(place, *ONCE, *launch, "--max_epochs", 2, *callback, *flags)
        self.images: list[Images] = []
        self.splits = []
        for rank in range(devices):
            lines = [json.loads(line) for line in (place / f"{rank}.jsonl").read_text().splitlines()]
            found = [((epoch, p), image) for epoch, ps, images in lines for p, image in zip(ps, images, strict=True)]
            assert len(dict(found)) == len(found)  # no image twice in an epoch
            self.images.append(dict(found))
            self.splits.append(json.loads((place / f"{rank}.split.json").read_text()))
        self.order = {epoch: [p for e, p in self.images[0] if e == epoch] for epoch in (0, 1)}

    @property
    def all(self) -> Images:
        return {key: image for rank in self.images for key, image in rank.items()}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, cache: list[str]) -> dict[int, Seen]:
    """On one process and on two."""
    return {devices: Seen(tmp_path_factory.mktemp("seen"), devices, *cache) for devices in (1, 2)}


@pytest.mark.slow
def test_ranks_see_disjoint_images_and_together_a_whole_epoch(seen: dict[int, Seen]) -> None:
    first, second = seen[2].images
    assert not first.keys() & second.keys()
    assert len(first) == len(second) == 84 * 32 * 2
    assert seen[2].all.keys() == seen[1].all.keys()


@pytest.mark.slow
def test_an_image_looks_the_same_on_any_number_of_processes_and_different_in_each_epoch(seen: dict[int, Seen]) -> None:
    assert seen[2].all == seen[1].all
    positions = {p for e, p in seen[1].all if e == 0} & {p for e, p in seen[1].all if e == 1}
    changed = sum(seen[1].all[0, p] != seen[1].all[1, p] for p in positions)
    assert changed > 0.9 * len(positions)
    assert seen[1].order[0] != seen[1].order[1]


@pytest.mark.slow
def test_validation_images_are_the_same_on_every_rank_and_none_is_trained_on(seen: dict[int, Seen]) -> None:
    for run in seen.values():
        assert all(split == seen[1].splits[0] for split in run.splits)
        split = run.splits[0]
        assert len(split["val"]) == 600
        assert not set(split["val"]) & set(split["train"])
        assert {position for _, position in run.all} <= set(split["train"])


@pytest.mark.slow
def test_four_processes_an_explicit_seed_and_another(seen: dict[int, Seen], tmp_path: Path, cache: list[str]) -> None:
    assert Seen(tmp_path / "four", 4, *cache).all == seen[1].all
    same, other = (Seen(tmp_path / f"seed{seed}", 2, *cache, "--seed", seed) for seed in (0, 1))
    assert same.all == seen[1].all
    assert other.order[0] != same.order[0]
    assert other.splits[0]["val"] != same.splits[0]["val"]
    assert other.splits[0] == other.splits[1]
    assert not set(other.splits[0]["val"]) & {position for _, position in other.all}


def weights(place: Path) -> dict[str, torch.Tensor]:
    return checkpoints(place)["last.ckpt"]["state_dict"]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# In float64: see the recipes in test_train.py.
@pytest.mark.slow
def test_stopped_on_one_and_resumed_on_two_and_the_other_way_it_is_within_1e_6(tmp_path: Path, cache: list[str]) -> None:
    """Dropout, momentum, OneCycle and augmentation are on; three lives each, stopped by SIGTERM inside an epoch."""
    flags = [*FLAGS, *cache, "--max_epochs", 12, "--precision", "64-true"]
    for name in ("whole", "one-two-one", "two-one-two"):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", *flags)
    expected, rates = weights(tmp_path / "whole"), learning_rates(tmp_path / "whole")
    assert len(rates) == 12 * 84
    for name, lives in (("one-two-one", ([], TWO, [])), ("two-one-two", (TWO, [], TWO))):
        place = tmp_path / name
        for number, devices in enumerate(lives):
            with Command(place, *flags, *devices, "--resume") as command:
                if number < 2:
                    wait_for(lambda epoch=4 * number + 3: f"epoch {epoch}/12" in command.output, 90)
                    time.sleep(0.4)  # into the next epoch
                    command.process.send_signal(signal.SIGTERM)
                    assert command.wait(30) == 143, command.output
                    assert steps_in_tensorboard(place)[-1] % 84 not in (83, 0)
                else:
                    assert command.wait(120) == 0, command.output
        assert difference(weights(place), expected) < 1e-6
        assert learning_rates(place) == rates
        assert steps_in_tensorboard(place) == list(range(12 * 84))


def learning_rates(place: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / RUN), size_guidance={"scalars": 0}).Reload()
    return {event.step: event.value for event in events.Scalars("learning_rate")}


ACCUMULATED = ["--model.network.dropout", "0", "--max_epochs", "1", "--data.val_fraction", "0"]


@pytest.mark.slow
def test_two_batches_of_8_accumulated_are_one_of_16(tmp_path: Path, cache: list[str]) -> None:
    """There is no BatchNorm in the network."""
    for name in ("accumulated", "at once"):
        (tmp_path / name).mkdir()
    accumulated = ["--batch_size", 8, "--trainer.accumulate_grad_batches", 2, "--trainer.limit_train_batches", 20]
    train(tmp_path / "accumulated", *ONCE, *cache, *ACCUMULATED, *accumulated)
    train(tmp_path / "at once", *ONCE, *cache, *ACCUMULATED, "--batch_size", 16, "--trainer.limit_train_batches", 10)
    assert difference(weights(tmp_path / "accumulated"), weights(tmp_path / "at once")) < 1e-6


@pytest.mark.slow
def test_ten_batches_accumulated_by_four_make_three_steps(tmp_path: Path, cache: list[str]) -> None:
    flags = [*ONCE, *cache, *ACCUMULATED, "--trainer.accumulate_grad_batches", 4, "--trainer.limit_train_batches", 10]
    for name, devices in (("one", []), ("two", TWO)):
        (tmp_path / name).mkdir()
        train(tmp_path / name, *flags, *devices)
        assert checkpoints(tmp_path / name)["last.ckpt"]["global_step"] == 3
    assert difference(weights(tmp_path / "one"), weights(tmp_path / "two")) < 1e-6


@pytest.mark.slow
def test_two_ddp_runs_at_once_share_nothing(tmp_path: Path) -> None:
    """Neither a port, nor the cache that both would make, nor a directory."""
    flags = [*ONCE, "--max_epochs", 1, *TWO, "--data.cache_dir", tmp_path / "cache"]
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    logs = ["--log_dir", tmp_path / "logs"]
    with Command(places[0], *flags, *logs) as one, Command(places[1], *flags, *logs) as two:
        assert (one.wait(), two.wait()) == (0, 0), one.output + two.output
    runs = sorted((tmp_path / "logs" / "default").iterdir())
    assert [run.name for run in runs] == ["version_0", "version_1"]
    first, second = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in runs)
    assert difference(first, second) == 0


def test_a_busy_port_is_named_at_once(tmp_path: Path, cache: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = python(ROOT / "scripts" / "train.py", *ONCE, *TWO, *cache, cwd=tmp_path, MASTER_PORT=str(port), timeout=40)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: MASTER_PORT {port} on 127.0.0.1 is in use; ")
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_spawned_processes_and_spawned_workers_compute_the_same(tmp_path: Path, cache: list[str]) -> None:
    flags = [*FLAGS, *cache, "--max_epochs", 1]
    for name in ("launched", "spawned"):
        (tmp_path / name).mkdir()
    train(tmp_path / "launched", *flags, *TWO)
    spawned = ["--strategy", "ddp_spawn", "--devices", 2, "--data.num_workers", 1]  # workers are spawned there too
    result = python(ROOT / "tests" / "programs" / "spawned.py", *flags, *spawned, cwd=tmp_path / "spawned")
    assert result.returncode == 0, result.stderr
    assert difference(weights(tmp_path / "launched"), weights(tmp_path / "spawned")) == 0
    assert [run.name for run in (tmp_path / "spawned" / "logs" / "default").iterdir()] == ["version_0"]
    figures = [json.loads((tmp_path / name / RUN / "summary.json").read_text()) for name in ("launched", "spawned")]
    assert [figure.pop("strategy") for figure in figures] == ["ddp", "ddp_spawn"]
    for figure in figures:
        del figure["train_seconds"], figure["images_per_second"]
    assert figures[0] == figures[1]
    assert figures[0]["num_test_images_counted"] == 2000


# ---- numbers and disks that come to an end


def test_a_loss_that_is_not_finite_ends_the_run_at_that_step(tmp_path: Path, cache: list[str]) -> None:
    flags = [
        *FLAGS,
        *cache,
        "--lr",
        "1e6",
        "--lr_scheduler",
        "null",
        "--model.max_grad_norm",
        "null",
        "--checkpoint_every",
        1,
    ]
    result = python(ROOT / "scripts" / "train.py", *flags, cwd=tmp_path)
    assert result.returncode == 1
    last = checkpoints(tmp_path)["last.ckpt"]
    step = last["global_step"]
    assert result.stderr.splitlines()[-1].startswith(f"error: step {step}: loss ")
    assert "at learning rate 1e+06" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert all(weight.isfinite().all() for weight in last["state_dict"].values())
    assert steps_in_tensorboard(tmp_path) == list(range(step))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("devices", [[], TWO], ids=["one process", "two processes"])
def test_a_full_disk_is_one_line_and_the_checkpoint_before_is_whole(
    devices: list[str], tmp_path: Path, cache: list[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=False)
    if mount.returncode:
        pytest.skip("this machine mounts no small disk")
    try:
        wide = ["--model.network.channels", "[8,8,16,16,32,64]", "--model.network.hidden", "512"]  # a checkpoint of 1.3 MB
        result = python(
            *(
                ROOT / "scripts" / "train.py",
                *FLAGS,
                *wide,
                *cache,
                *devices,
                "--checkpoint_every",
                3,
                "--log_dir",
                disk / "logs",
            ),
            cwd=tmp_path,
        )
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        line = result.stderr.splitlines()[-1]
        assert line.startswith(f"error: {disk}/logs/default/version_0/checkpoints/last.ckpt could not be written: ")
        assert "No space left on device" in line
        assert f"MiB are free in {disk}/logs" in line
        kept = torch.load(disk / "logs" / "default" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)
        assert kept["global_step"] % 3 == 0
        assert left_over(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)

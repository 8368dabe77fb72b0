"""A run that was stopped, at any place where it can stop, ends as if it had not been."""

import json
import math
import pickle
import shutil
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from project.data.datamodule import ImageDataModule
from project.data.sources import Cifar10Source
from project.errors import UsageError
from project.model.classifier import Classifier
from project.run.cli import TrainCLI
from project.run.outputs import RunDirectory, job_key, newest_run, run_of_this_job
from project.run.signals import Stopped, stop_signal
from tests.conftest import ImageFolder

NARROW = ["--model.network.channels", "[4,4,8,8,8,8]", "--model.network.hidden", "16", "--model.network.dropout", "0.2"]
# Four batches an epoch, two of validation: an epoch has 1 + 3 + 2 boundaries, and one run of two epochs 12.
SHORT = ["--data.source", "synthetic", "--data.image_size", "8", "--data.shift", "2", "--max_epochs", "2"]
SHORT += ["--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "2", "--data.eval_batch_size", "50"]
SHORT += ["--trainer.log_every_n_steps", "1", "--trainer.limit_test_batches", "1", "--accelerator", "cpu"]
PLATEAU = ["--lr_scheduler.monitor", "val/loss", "--lr_scheduler.patience", "0", "--lr_scheduler.threshold", "0.5"]
STOPPING = ["--trainer.callbacks.monitor", "val/loss", "--trainer.callbacks.patience", "1"]
SPEED = [
    "--model.network",
    "project.model.speednet.SpeedNet",
    "--model.network.widths",
    "[4,4,8]",
    "--data.image_size",
    "12",
]
SPEED += ["--optimizer", "project.model.optimizers.Muon", "--lr_scheduler", "project.model.schedules.LinearDecay"]
SPEED += ["--data.alternate_flip", "true", "--model.label_smoothing", "0.2"]
SCHEDULES: dict[str, list[str]] = {
    "the default recipe": [],
    "a checkpoint every step": ["--checkpoint_every", "1"],
    "two validations an epoch": ["--trainer.val_check_interval", "0.5"],
    "accumulated gradients": ["--trainer.accumulate_grad_batches", "3"],
    "accumulated by two": ["--trainer.accumulate_grad_batches", "2"],
    "validated between accumulated batches": ["--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "1"],
    "a number of steps": ["--trainer.max_steps", "7"],
    "a number of steps that ends an epoch": ["--trainer.max_steps", "8"],
    "no validation": ["--data.val_fraction", "0"],
    "validation every other epoch": ["--trainer.check_val_every_n_epoch", "2"],
    "a schedule by epochs": ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"],
    "a schedule that watches": ["--lr_scheduler", "lightning.pytorch.cli.ReduceLROnPlateau", *PLATEAU],
    "early stopping": ["--max_epochs", "5", "--lr", "1e-12", "--trainer.callbacks", "EarlyStopping", *STOPPING],
    "float64": ["--precision", "64-true"],
    "the speed recipe": SPEED,
    "two workers": ["--data.num_workers", "2"],
}


class Watch(Callback):
    """Notes what is trained on: the step, the learning rate and the images' sum."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.fit_loop.total_batch_idx, rate, batch[0].double().sum().item()))


class Run:
    """One command, in this process.

    Attributes:
        seen: As `Watch` notes it.
        stopped: Whether it stopped at the boundary that was asked for.
    """

    def __init__(self, place: Path, *flags: object, stop_at: int = 0, monkeypatch: pytest.MonkeyPatch) -> None:
        boundary = 0

        def passes() -> bool:
            nonlocal boundary
            boundary += 1
            return boundary != stop_at

        monkeypatch.setattr(stop_signal, "passes", passes)
        monkeypatch.setattr(stop_signal, "stopped", lambda: Stopped(15))
        monkeypatch.chdir(place)
        watch = Watch()
        cli = TrainCLI(Classifier, ImageDataModule, [str(flag) for flag in flags])
        cli.trainer.callbacks.insert(0, watch)
        self.stopped = False
        try:
            cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.resume_from, weights_only=True)
            cli.trainer.test(cli.model, cli.datamodule, ckpt_path=cli.best_checkpoint, weights_only=True, verbose=False)
            cli.summarise()
        except Stopped:
            self.stopped = True
        finally:
            if cli.run_directory._lock is not None:
                cli.run_directory._lock.release()  # as the end of the process does
        self.seen = watch.seen
        self.boundaries = boundary


def state(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "logs" / "default" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)


OF_THE_MACHINE = ("speed/", "device/", "_hparams_")  # tags of what differs from one run to the next, and of no figures


def points(folder: Path) -> Counter[tuple[str, int, float]]:
    """Every scalar in the run's event files, but for the speeds: tag, step, value; and every picture, by its bytes."""
    found: Counter[tuple[str, int, float]] = Counter()
    for path in (folder / "logs" / "default" / "version_0").glob("events.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag.startswith(OF_THE_MACHINE):
                    continue
                if value.tensor.float_val:
                    found[value.tag, event.step, round(value.tensor.float_val[0], 6)] += 1
                elif not value.tag.endswith("text_summary") and value.tensor.string_val:  # texts tell of the command
                    found[value.tag, event.step, hash(value.tensor.string_val[-1])] += 1
    return found


def summary(folder: Path) -> dict[str, Any]:
    figures = json.loads((folder / "logs" / "default" / "version_0" / "summary.json").read_text())
    return {name: value for name, value in figures.items() if name not in ("train_seconds", "images_per_second")}


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_same(first, second, f"{path}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other)), path


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.parametrize(
    "schedule",
    [
        name if name in ("the default recipe", "a number of steps") else pytest.param(name, marks=pytest.mark.slow)
        for name in SCHEDULES
    ],
)
def test_stopped_at_every_boundary_and_resumed_it_is_the_same_run(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer, schedule, counters and figures, to the last bit; every step trained once, on the same images."""
    (tmp_path / "whole").mkdir()
    network = [] if SCHEDULES[schedule] is SPEED else NARROW
    flags = [*SHORT, *network, "--data.cache_dir", str(tmp_path / "cache"), *SCHEDULES[schedule]]
    whole = Run(tmp_path / "whole", *flags, monkeypatch=monkeypatch)
    assert not whole.stopped
    expected = state(tmp_path / "whole")
    for boundary in range(2, whole.boundaries + 1):
        place = tmp_path / "stopped"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        first = Run(place, *flags, stop_at=boundary, monkeypatch=monkeypatch)
        assert first.stopped
        # The command line is not repeated: the configuration comes out of the checkpoint.
        second = Run(place, "--resume", monkeypatch=monkeypatch)
        trained = [*first.seen, *second.seen]
        assert sorted({number for number, _, _ in trained}) == [number for number, _, _ in whole.seen], boundary
        assert set(trained) == set(whole.seen), boundary
        after = state(place)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "classifier", "global_step", "epoch"):
            assert_same(expected[part], after[part], f"{boundary}: {part}")
        assert points(place) == points(tmp_path / "whole"), boundary
        assert summary(place) == summary(tmp_path / "whole"), boundary


# ---- what it is continued from


RUN = Path("logs", "default", "version_0")


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs that was stopped in the second, with all three checkpoints; tests copy it."""
    place = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as monkeypatch:
        flags = [*SHORT, *NARROW, "--data.cache_dir", place.parent / "cache", "--checkpoint_every", "1"]
        assert Run(place, *flags, stop_at=10, monkeypatch=monkeypatch).stopped
    assert {path.name for path in (place / RUN / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt", "previous.ckpt"}
    return place


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """A folder with a copy of it."""
    shutil.copytree(stopped_run / "logs", tmp_path / "here" / "logs")
    return tmp_path / "here"


CONTRADICTIONS = {
    "--batch_size 32": "was trained with 64",
    "--seed 1": "was trained with 0",
    "--lr 0.5": "was trained with 0.03",
    "--optimizer Adam": "was trained with torch.optim.SGD",
    "--model.network.hidden 17": "was trained with 16",
    "--model.network tests.programs.batchnorm.WithBatchNorm": "was trained with project.model.networks.ConvNet",
    "--model.max_grad_norm 1": "was trained with 3.0",
    "--data.val_fraction 0.2": "was trained with 0.1",
    "--data.source cifar10": "was trained with synthetic",
    "--data.flip false": "was trained with True",
    "--precision 64-true": "was trained with None",
    "--trainer.accumulate_grad_batches 2": "was trained with 1",
    "--trainer.limit_train_batches 3": "was trained with 4",
}


@pytest.mark.parametrize("flags", CONTRADICTIONS)
def test_another_run_than_the_checkpoints_is_refused(flags: str, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as error:
        Run(stopped, "--resume", *flags.split(), monkeypatch=monkeypatch)
    message = str(error.value)
    flag = flags.split()[0]
    assert message.startswith(f"{flag} ")
    assert CONTRADICTIONS[flags] in message
    assert "give it the same, or start a new run without --resume" in message
    assert "\n" not in message
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_a_schedule_that_spans_the_run_cannot_be_made_longer(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stopped / RUN / ".lock").touch()
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"falls over 8 optimizer steps, this command's over 12"):
        Run(stopped, "--resume", "--max_epochs", "3", monkeypatch=monkeypatch)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("short", "long"),
    [(["--max_epochs", "1"], ["--max_epochs", "2"]), (["--trainer.max_steps", "6"], ["--trainer.max_steps", "8"])],
)
def test_with_a_constant_rate_a_finished_run_can_be_made_longer(
    short: list[str], long: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*SHORT, *NARROW, "--data.cache_dir", tmp_path / "cache", "--lr_scheduler", "null"]
    for name in ("whole", "longer"):
        (tmp_path / name).mkdir()
    Run(tmp_path / "whole", *flags, *long, monkeypatch=monkeypatch)
    Run(tmp_path / "longer", *flags, *short, monkeypatch=monkeypatch)
    Run(tmp_path / "longer", "--resume", *long, monkeypatch=monkeypatch)
    assert_same(state(tmp_path / "whole")["state_dict"], state(tmp_path / "longer")["state_dict"])
    losses = sorted(
        step for (tag, step, _), times in points(tmp_path / "longer").items() if tag == "train/loss" for _ in range(times)
    )
    assert losses == list(range(8))


def test_fewer_epochs_than_are_done_and_another_name_are_refused(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--max_epochs 0: .*last\.ckpt has done 1 already; give at least 1"):
        Run(stopped, "--resume", "--max_epochs", "0", monkeypatch=monkeypatch)
    with pytest.raises(UsageError, match=r"--name other: .* is a run of default and stays there"):
        Run(stopped, "--resume", RUN, "--name", "other", monkeypatch=monkeypatch)


def test_a_finished_run_is_tested_again_and_nothing_is_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*SHORT, *NARROW, "--data.cache_dir", tmp_path / "cache"]
    Run(tmp_path, *flags, monkeypatch=monkeypatch)
    before, figures = points(tmp_path), summary(tmp_path)
    again = Run(tmp_path, "--resume", monkeypatch=monkeypatch)
    assert again.seen == []
    assert points(tmp_path) == before
    assert summary(tmp_path) == figures


def test_resume_without_a_run_begins_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, *SHORT, *NARROW, "--data.cache_dir", tmp_path / "cache", "--resume", stop_at=3, monkeypatch=monkeypatch)
    assert "resume: no run default in logs yet, so this is a new one" in capsys.readouterr().out
    assert (tmp_path / RUN).is_dir()


def test_a_run_without_a_checkpoint_begins_again_in_its_place(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stopped / RUN / "checkpoints")
    Run(stopped, "--resume", monkeypatch=monkeypatch)
    assert "has no checkpoint yet, so from its first step, set as its config.yaml says" in capsys.readouterr().out
    assert sorted(step for (tag, step, _) in points(stopped) if tag == "train/loss") == list(range(8))
    assert [path.name for path in (stopped / RUN).parent.iterdir()] == ["version_0"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "--resume nowhere is not there"),
        ("logs", "--resume logs holds no checkpoint"),
        ("https://example.com/last.ckpt", "is a URL"),
        ("s3://bucket/last.ckpt", "is a URL"),
        ("file:///tmp/last.ckpt", "is a URL"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused(
    path: str, message: str, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=message):
        Run(stopped, "--resume", path, monkeypatch=monkeypatch)


def test_weights_alone_cannot_be_continued(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(state(stopped)["state_dict"], stopped / "weights.ckpt")
    with pytest.raises(UsageError, match=r"weights\.ckpt is no checkpoint of a training run"):
        Run(stopped, "--resume", "weights.ckpt", monkeypatch=monkeypatch)


def test_a_run_directory_is_continued_in_its_place(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stopped / RUN).with_name("version_7").mkdir()  # a newer one, of another run
    Run(stopped, "--resume", RUN, monkeypatch=monkeypatch)
    assert state(stopped)["global_step"] == 8
    assert list((stopped / RUN).with_name("version_7").iterdir()) == []


def test_a_checkpoint_is_continued_in_a_new_run_and_stays_as_it_was(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in (stopped / RUN).rglob("*") if path.is_file()}
    last = RUN / "checkpoints" / "last.ckpt"
    assert Run(stopped, "--resume", last, stop_at=1, monkeypatch=monkeypatch).stopped
    brought = torch.load((stopped / RUN).with_name("version_1") / "checkpoints" / "best.ckpt", weights_only=True)
    assert (brought["epoch"], brought["global_step"]) == (0, 4)
    Run(stopped, "--resume", (stopped / RUN).with_name("version_1"), monkeypatch=monkeypatch)
    assert {path: path.read_bytes() for path in (stopped / RUN).rglob("*") if path.is_file()} == before
    new = (stopped / RUN).with_name("version_1")
    assert torch.load(new / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 8
    figures = json.loads((new / "summary.json").read_text())
    best = torch.load(new / "checkpoints" / "best.ckpt", weights_only=True)
    assert figures["best_epoch"] == best["epoch"]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut off":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a bit flipped":
        with zipfile.ZipFile(path) as records:
            largest = max(records.infolist(), key=lambda record: record.file_size)
        data[largest.header_offset + largest.file_size // 2] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(b"no checkpoint at all, but some text")


@pytest.mark.filterwarnings("default:checkpoint .* is damaged")
@pytest.mark.parametrize("how", ["cut off", "empty", "a bit flipped", "text"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    how: str, stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    previous = torch.load(stopped / RUN / "checkpoints" / "previous.ckpt", weights_only=True)["global_step"]
    damage(stopped / RUN / "checkpoints" / "last.ckpt", how)
    Run(stopped, "--resume", monkeypatch=monkeypatch)
    output = capsys.readouterr()
    assert f"resume: from step {previous}, {RUN}/checkpoints/previous.ckpt" in output.out
    assert f"warning: checkpoint {RUN}/checkpoints/last.ckpt is damaged" in output.err
    assert state(stopped)["global_step"] == 8
    assert sorted(step for (tag, step, _) in points(stopped) if tag == "train/loss") == list(range(8))


def test_a_checkpoint_between_the_batches_of_one_step_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """best.ckpt, saved by a validation, lacks the gradients that wait there; what was saved before it is taken."""
    between = SCHEDULES["validated between accumulated batches"]
    flags = [*SHORT, *NARROW, "--data.cache_dir", tmp_path / "cache", *between, "--max_epochs", "1"]
    Run(tmp_path, *flags, monkeypatch=monkeypatch)
    folder = tmp_path / RUN / "checkpoints"
    best = torch.load(folder / "best.ckpt", weights_only=True)
    assert best["run"]["gradients_pending"]
    with pytest.raises(UsageError, match=r"best\.ckpt was saved by a validation between the batches of one step"):
        Run(tmp_path, "--resume", folder / "best.ckpt", monkeypatch=monkeypatch)
    torch.save({**best, "global_step": 99}, folder / "best.ckpt")
    (folder / "last.ckpt").rename(folder / "previous.ckpt")
    capsys.readouterr()
    Run(tmp_path, "--resume", monkeypatch=monkeypatch)
    assert f"{RUN}/checkpoints/previous.ckpt" in capsys.readouterr().out


def test_a_validation_that_is_done_again_is_not_shown_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """best.ckpt is saved by a validation, before its figures are written; who continues it validates first."""
    flags = [*SHORT, *NARROW, "--data.cache_dir", tmp_path / "cache", "--trainer.val_check_interval", "0.5", "--lr", "1e-12"]
    Run(tmp_path, *flags, monkeypatch=monkeypatch)
    before, folder = points(tmp_path), tmp_path / RUN / "checkpoints"
    assert torch.load(folder / "best.ckpt", weights_only=True)["global_step"] == 2
    (folder / "last.ckpt").unlink()
    (folder / "previous.ckpt").unlink()
    Run(tmp_path, "--resume", monkeypatch=monkeypatch)
    assert points(tmp_path) == before


def test_validations_after_the_checkpoint_that_are_done_again_are_not_shown_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between accumulated batches there are several at the same optimizer step, before a checkpoint of it and after."""
    gathered = ["--trainer.accumulate_grad_batches", "3", "--trainer.val_check_interval", "1"]
    flags = [*SHORT, *NARROW, "--data.cache_dir", tmp_path / "cache", *gathered]
    for name in ("killed", "stopped"):
        (tmp_path / name).mkdir()
    whole = Run(tmp_path / "killed", *flags, monkeypatch=monkeypatch)
    before, kept = points(tmp_path / "killed"), tmp_path / "killed" / RUN / "checkpoints"
    for boundary in range(3, whole.boundaries + 1):
        stopped = tmp_path / "stopped" / RUN / "checkpoints"
        Run(tmp_path / "stopped", *flags, stop_at=boundary, monkeypatch=monkeypatch)
        step = torch.load(stopped / "last.ckpt", weights_only=True)["global_step"]
        if step > 0 and step % 2:  # within an epoch of two steps
            break
        shutil.rmtree(tmp_path / "stopped" / "logs")
    shutil.rmtree(kept)
    shutil.copytree(stopped, kept)
    assert Run(tmp_path / "killed", "--resume", monkeypatch=monkeypatch).seen
    assert points(tmp_path / "killed") == before


def test_the_configuration_shown_is_the_one_that_the_run_goes_on_with(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(stopped, "--resume", "--checkpoint_every", "3", monkeypatch=monkeypatch)
    texts = {}
    for path in sorted((stopped / RUN).glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "configuration/text_summary":
                    texts[event.step] = value.tensor.string_val[0].decode()
    assert "checkpoint_every: 1" in texts.pop(0)
    (last,) = texts.values()
    assert last == f"```yaml\n{(stopped / RUN / 'config.yaml').read_text()}```"
    assert "checkpoint_every: 3" in last


def test_where_all_are_damaged_it_says_so(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (stopped / RUN / "checkpoints").iterdir():
        damage(path, "cut off")
    with pytest.raises(UsageError, match=r"no checkpoint in .* is whole"):
        Run(stopped, "--resume", monkeypatch=monkeypatch)


def test_what_a_killed_writer_left_is_removed(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = stopped / RUN / "checkpoints" / ".last.ckpt.123.tmp"
    half.write_bytes(b"half")
    Run(stopped, "--resume", monkeypatch=monkeypatch)
    assert not half.exists()


def test_a_run_that_is_still_going_on_is_not_continued(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("project.run.outputs.SECONDS_TO_WAIT", 0)
    with FileLock(stopped / RUN / ".lock"), pytest.raises(UsageError, match="still being written by another process"):
        Run(stopped, "--resume", monkeypatch=monkeypatch)
    assert (stopped / RUN / "checkpoints" / "last.ckpt").exists()


def test_other_images_are_refused_by_their_digest(
    image_folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*SHORT, *NARROW, "--data.cache_dir", tmp_path / "cache", "--data.source", "folder", "--batch_size", "4"]
    first, second = (image_folder([20, 20], [4, 4], seed=seed) for seed in (0, 1))
    Run(tmp_path, *flags, "--data.root", first, stop_at=4, monkeypatch=monkeypatch)
    points_before = points(tmp_path)
    with pytest.raises(UsageError, match=r"the images \w{12}: the checkpoint was trained with \w{12};"):
        Run(tmp_path, "--resume", "--data.root", second, monkeypatch=monkeypatch)
    assert points(tmp_path) == points_before
    moved = first.rename(tmp_path / "moved")
    Run(tmp_path, "--resume", "--data.root", moved, monkeypatch=monkeypatch)  # the same images, elsewhere
    assert state(tmp_path)["global_step"] == 8


# ---- what a checkpoint must not do


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["in a checkpoint", "a plain pickle"])
@pytest.mark.parametrize("flag", [[], [RUN / "checkpoints" / "last.ckpt"], [RUN]], ids=["newest", "file", "directory"])
def test_a_checkpoint_that_would_run_code_is_refused(
    kind: str, flag: list[Path], stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, marker = stopped / RUN / "checkpoints" / "last.ckpt", stopped / "marker"
    if kind == "in a checkpoint":
        torch.save({**state(stopped), "more": Marker(marker)}, last)
    else:
        last.write_bytes(pickle.dumps({**state(stopped), "more": Marker(marker)}))
    with pytest.raises(UsageError, match=r"last\.ckpt is refused: it is not plain values but would run code"):
        Run(stopped, "--resume", *flag, monkeypatch=monkeypatch)
    assert not marker.exists()


def test_an_instantiator_in_the_hyper_parameters_is_refused(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = stopped / RUN / "checkpoints" / "last.ckpt"
    torch.save({**state(stopped), "hyper_parameters": {"_instantiator": "tests.programs.marker.make"}}, last)
    with pytest.raises(UsageError, match=r"last\.ckpt is refused: its _instantiator names code to run"):
        Run(stopped, "--resume", monkeypatch=monkeypatch)


def test_the_trainer_reads_no_other_way(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever hands it a path, also with weights_only=False."""
    last, marker = stopped / RUN / "checkpoints" / "last.ckpt", stopped / "marker"
    torch.save({**state(stopped), "more": Marker(marker)}, last)
    cli = TrainCLI(Classifier, ImageDataModule, [*SHORT, *NARROW, "--log_dir", str(stopped / "other")])
    for path in (last, "https://example.com/last.ckpt"):
        with pytest.raises(UsageError, match=r"refused|URL"):
            cli.trainer.test(cli.model, cli.datamodule, ckpt_path=path, weights_only=False)
    assert not marker.exists()


# ---- without being told


JOBS = {
    "Slurm": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"},
    "an array of Slurm": {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"},
    "torchrun without a name": {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
}


@pytest.mark.parametrize("launcher", JOBS)
def test_a_restarted_job_finds_its_own_run_among_others_of_the_name(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in JOBS[launcher].items():
        monkeypatch.setenv(name, "0" if name.endswith("RESTART_COUNT") else value)
    mine = RunDirectory(str(tmp_path), "name").path
    assert run_of_this_job(str(tmp_path), "name") is None
    other = {"SLURM_JOB_ID": "9", "TORCHELASTIC_RUN_ID": "xyz"}
    for name in JOBS[launcher].keys() & other.keys():
        monkeypatch.setenv(name, other[name])
    RunDirectory(str(tmp_path), "name").path.exists()
    for name, value in JOBS[launcher].items():
        monkeypatch.setenv(name, value)
    assert newest_run(str(tmp_path), "name") == tmp_path / "name" / "version_1"
    assert run_of_this_job(str(tmp_path), "name") == mine == tmp_path / "name" / "version_0"


def test_a_command_of_its_own_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert job_key() is None


def test_what_was_replaced_before_the_stop_is_still_said_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(source: Cifar10Source) -> None:
        raise UsageError("--data.source cifar10: it cannot be reached")

    monkeypatch.setattr(Cifar10Source, "prepare", offline)
    warnings.filterwarnings("default", "THIS RUN IS NOT ON CIFAR-10")
    auto = ["--data.source", "auto", "--data.image_size", "32", "--data.root", tmp_path / "nowhere"]
    flags = [*SHORT, *NARROW, *auto, "--data.cache_dir", tmp_path / "cache"]
    Run(tmp_path, *flags, stop_at=4, monkeypatch=monkeypatch)
    capsys.readouterr()
    Run(tmp_path, "--resume", monkeypatch=monkeypatch)
    assert "warning: THIS RUN IS NOT ON CIFAR-10" in capsys.readouterr().out
    assert "THIS RUN IS NOT ON CIFAR-10" in summary(tmp_path)["warnings"][0]

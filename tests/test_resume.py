"""A run that was stopped, at any place where it can stop, ends as if it had not been."""

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from project.data.datamodule import ImageDataModule
from project.model.classifier import Classifier
from project.run.cli import TrainCLI
from project.run.signals import Stopped, stop_signal

NARROW = ["--model.network.channels", "[4,4,8,8,8,8]", "--model.network.hidden", "16", "--model.network.dropout", "0.2"]
# Four batches an epoch, two of validation: an epoch has 1 + 3 + 2 boundaries, and one run of two epochs 12.
SHORT = ["--data.source", "synthetic", "--data.image_size", "8", "--data.shift", "2", "--max_epochs", "2"]
SHORT += ["--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "2", "--data.eval_batch_size", "50"]
SHORT += ["--trainer.log_every_n_steps", "1", "--trainer.limit_test_batches", "1", "--accelerator", "cpu"]
PLATEAU = ["--lr_scheduler.monitor", "val/loss", "--lr_scheduler.patience", "0", "--lr_scheduler.threshold", "0.5"]
STOPPING = ["--trainer.callbacks.monitor", "val/loss", "--trainer.callbacks.patience", "1"]
SCHEDULES: dict[str, list[str]] = {
    "the default recipe": [],
    "a checkpoint every step": ["--checkpoint_every", "1"],
    "two validations an epoch": ["--trainer.val_check_interval", "0.5"],
    "accumulated gradients": ["--trainer.accumulate_grad_batches", "3"],
    "a number of steps": ["--trainer.max_steps", "7"],
    "no validation": ["--data.val_fraction", "0"],
    "validation every other epoch": ["--trainer.check_val_every_n_epoch", "2"],
    "a schedule by epochs": ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"],
    "a schedule that watches": ["--lr_scheduler", "lightning.pytorch.cli.ReduceLROnPlateau", *PLATEAU],
    "early stopping": ["--max_epochs", "5", "--lr", "1e-12", "--trainer.callbacks", "EarlyStopping", *STOPPING],
    "float64": ["--precision", "64-true"],
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
        self.seen = watch.seen
        self.boundaries = boundary
        cli.run_directory._lock.release()


def state(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "logs" / "default" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)


def points(folder: Path) -> Counter[tuple[str, int, float]]:
    """Every scalar in the run's event files, but for the speeds: tag, step, value."""
    found: Counter[tuple[str, int, float]] = Counter()
    for path in (folder / "logs" / "default" / "version_0").glob("events.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag != "images_per_second" and not value.tag.startswith("_hparams_"):
                    found[value.tag, event.step, round(value.tensor.float_val[0], 6)] += 1
    return found


def summary(folder: Path) -> dict[str, Any]:
    import json

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
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stopped_at_every_boundary_and_resumed_it_is_the_same_run(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer, schedule, counters and figures, to the last bit; every step trained once, on the same images."""
    (tmp_path / "whole").mkdir()
    flags = [*SHORT, *NARROW, "--data.cache_dir", str(tmp_path / "cache"), *SCHEDULES[schedule]]
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
        done = {number: (number, rate, images) for number, rate, images in first.seen[: -1 if first.seen else None]}
        trained = [*first.seen, *second.seen]
        assert sorted({number for number, _, _ in trained}) == [number for number, _, _ in whole.seen], boundary
        assert set(trained) == set(whole.seen), boundary
        assert done is not None
        after = state(place)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "classifier", "global_step", "epoch"):
            assert_same(expected[part], after[part], f"{boundary}: {part}")
        assert points(place) == points(tmp_path / "whole"), boundary
        assert summary(place) == summary(tmp_path / "whole"), boundary

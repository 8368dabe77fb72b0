"""Callbacks of every run: how fast it goes, what each epoch came to, one line about it, and a bar that costs nothing."""

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import CustomBarColumn
from lightning.pytorch.utilities.data import extract_batch_size
from rich.progress import TextColumn

from project.model.classifier import is_end_of_epoch, is_writing_step
from project.run.usage import DeviceUse, devices_of

SECONDS_BETWEEN_LINES = 60.0  # where there is no bar; and a twentieth of the run at least


class RunRecord(Callback):
    """Measure the training speed, remember each epoch's validation figures, and print one line an epoch, or a minute.

    Attributes:
        train_seconds: From the first step to the last, validation and checkpoints included.
        epoch_seconds: Of that, the training alone, without validation.
        num_images: Training images in those epochs, over all devices.
        num_epochs: Epochs begun.
        num_steps: Optimizer steps done.
        validations: Epoch, counted from 0, loss and accuracy of each validation.

    A run that is continued goes on with all of them.
    """

    def __init__(self) -> None:
        self.num_epochs = self.num_steps = 0
        self.images_per_second = 0.0  # up to the last written point
        self.train_seconds = 0.0
        self.epoch_seconds = 0.0
        self.num_images = 0
        self.validations: list[tuple[int, float, float]] = []
        self._run_start = self._epoch_start = self._window_start = 0.0
        self._window_images = self._epoch_images = 0
        self._window_batches = 0
        self._pause_start = 0.0
        self._restored: dict[str, Any] = {}
        self._use: DeviceUse | None = None
        self._process_start = self._last_line = 0.0  # when this process began to train; when it last printed
        self._first_batch = self._line_batch = 0  # the batches done at those times

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the run's clock, and an epoch's, in case that this run goes on inside one."""
        now = time.perf_counter()
        self._begin_epoch()
        self._use = DeviceUse(devices_of(trainer.strategy))
        self._process_start = self._last_line = now
        self._first_batch = self._line_batch = trainer.fit_loop.total_batch_idx + 1
        if self._restored:
            self._run_start = now - self._restored["train_seconds"]
            self._epoch_start = now - self._restored["seconds_of_this_epoch"]
            self._epoch_images = self._restored["images_of_this_epoch"]
        else:
            self._run_start = now

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self._begin_epoch()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the figures so far; none before the start, where a learning-rate finder saves what it will restore."""
        if not self._process_start:
            return
        now = time.perf_counter()
        checkpoint["record"] = {
            "num_epochs": self.num_epochs,
            "num_steps": trainer.global_step,
            "train_seconds": now - self._run_start,
            "epoch_seconds": self.epoch_seconds,
            "num_images": self.num_images,
            "validations": [list(figures) for figures in self.validations],
            "seconds_of_this_epoch": now - self._epoch_start,
            "images_of_this_epoch": self._epoch_images + self._window_images,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with them; not when a checkpoint is only tested."""
        if trainer.state.fn == "fit" and "record" in checkpoint:
            self.take_over(checkpoint["record"])

    def take_over(self, record: dict[str, Any]) -> None:
        """Go on with the figures that a checkpoint holds."""
        self._restored = record
        self.num_epochs, self.num_steps, self.train_seconds = (
            record["num_epochs"],
            record["num_steps"],
            record["train_seconds"],
        )
        self.epoch_seconds, self.num_images = record["epoch_seconds"], record["num_images"]
        self.validations = [(int(epoch), loss, accuracy) for epoch, loss, accuracy in record["validations"]]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count images; write the speed as often as the classifier writes the loss."""
        known = isinstance(batch, tuple | list) and len(batch) > 1  # another is a data module's of the user's
        self._window_images += (len(batch[1]) if known else extract_batch_size(batch)) * trainer.world_size
        self._window_batches += 1
        if is_writing_step(trainer, batch_idx):
            if trainer.strategy.root_device.type != "cpu":
                torch.accelerator.synchronize(
                    trainer.strategy.root_device
                )  # or the clock would show what has been asked for
            now = time.perf_counter()
            seconds = now - self._window_start
            self.images_per_second = self._window_images / seconds
            figures = {
                "speed/images_per_second": self.images_per_second,
                "speed/step_milliseconds": 1000 * seconds / self._window_batches,
                "epoch": trainer.current_epoch,
                **self._device_use(trainer),
            }
            for logger in trainer.loggers:
                logger.log_metrics(figures, trainer.global_step - 1)
            self._epoch_images += self._window_images
            self._window_images, self._window_batches, self._window_start = 0, 0, now
            if trainer.is_global_zero and trainer.progress_bar_callback is None and not is_end_of_epoch(trainer):
                self._print_now_and_then(trainer, pl_module, now)

    def _device_use(self, trainer: Trainer) -> dict[str, float]:
        """Return how busy the devices of all ranks are in the mean, and how full the fullest is."""
        assert self._use is not None
        own = torch.tensor(self._use.since_last(), device=trainer.strategy.root_device)
        busy, full = trainer.strategy.all_gather(own).reshape(-1, 2).unbind(dim=1)
        use = {
            f"device/{self._use.kind}_percent": busy.mean().item(),
            f"device/{self._use.kind}_memory_mib": full.max().item(),
        }
        return {name: value for name, value in use.items() if value == value}  # NaN where the GPUs do not tell

    def _print_now_and_then(self, trainer: Trainer, pl_module: LightningModule, now: float) -> None:
        """Print a line where the last one is long ago: an epoch may take hours."""
        done, total = trainer.fit_loop.total_batch_idx + 1, total_batches(trainer)
        share = (done - self._line_batch) / total if total else 1
        if now - self._last_line < SECONDS_BETWEEN_LINES or share < 0.05:
            return
        self._last_line, self._line_batch = now, done
        parts = [epoch_of(trainer), f"step {trainer.fit_loop.batch_idx + 1}/{trainer.num_training_batches}"]
        if point := getattr(pl_module, "last_point", None):
            parts.append(f"train loss {point['train/loss']:.3f} accuracy {point['train/accuracy']:.4f}")
        if left := self.seconds_left(trainer):
            parts.append(f"{clock(left)} left")
        print("  ".join(parts), flush=True)

    def seconds_left(self, trainer: Trainer) -> float | None:
        """Return how long the run will still take, at the pace of this process so far; None where that is not known."""
        done, total = trainer.fit_loop.total_batch_idx + 1, total_batches(trainer)
        if not total or done <= self._first_batch:
            return None
        return (time.perf_counter() - self._process_start) / (done - self._first_batch) * max(0, total - done)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the training clocks meanwhile."""
        start = time.perf_counter()
        yield
        pause = time.perf_counter() - start
        self._epoch_start += pause
        self._window_start += pause

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the training clocks."""
        self._pause_start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the training clocks, and remember the figures."""
        pause = time.perf_counter() - self._pause_start
        self._epoch_start += pause
        self._window_start += pause
        figures = trainer.callback_metrics
        if trainer.state.fn == "fit" and not trainer.sanity_checking and "val/accuracy" in figures:
            self.validations.append((trainer.current_epoch, figures["val/loss"].item(), figures["val/accuracy"].item()))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add up the epoch and print its line."""
        self.num_epochs = trainer.current_epoch + 1
        seconds = time.perf_counter() - self._epoch_start
        self.epoch_seconds += seconds
        self.num_images += self._epoch_images
        if trainer.is_global_zero:
            epoch = trainer.current_epoch
            parts = [epoch_of(trainer)]
            figures = trainer.callback_metrics
            if "train/loss" in figures:
                parts.append(f"train loss {figures['train/loss']:.3f} accuracy {figures['train/accuracy']:.4f}")
            if self.validations and self.validations[-1][0] == epoch:
                parts.append("val loss {1:.3f} accuracy {2:.4f}".format(*self.validations[-1]))
            parts.append(f"{self._epoch_images / seconds:,.0f} images/s")
            bar = trainer.progress_bar_callback  # prints above itself, where there is one
            (bar.print if bar else print)("  ".join(parts))
            sys.stdout.flush()
            self._last_line, self._line_batch = time.perf_counter(), trainer.fit_loop.total_batch_idx + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the run's clock."""
        self.num_steps = trainer.global_step
        self.train_seconds = time.perf_counter() - self._run_start

    def _begin_epoch(self) -> None:
        self._epoch_start = self._window_start = time.perf_counter()
        self._window_images = self._epoch_images = self._window_batches = 0


def epoch_of(trainer: Trainer) -> str:
    """Return which epoch it is of how many, in words."""
    number, most = trainer.current_epoch + 1, trainer.max_epochs or -1
    return f"epoch {number}/{most}" if most > 0 else f"epoch {number}"


def total_batches(trainer: Trainer) -> int | None:
    """Return how many training batches the whole run has, of this rank; None where that is not known."""
    an_epoch, most, gathered = trainer.num_training_batches, trainer.max_epochs, trainer.accumulate_grad_batches
    totals = []
    if most is not None and most >= 0 and math.isfinite(an_epoch):
        totals.append(int(an_epoch) * most)
    if trainer.max_steps >= 0:
        totals.append(trainer.max_steps * gathered)  # at most: an epoch's last step may gather fewer
    return min(totals, default=None)


def clock(seconds: float) -> str:
    """Return a time as 0:42, 12:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressBar(RichProgressBar):
    """Lightning's bar, drawn ten times a second instead of at every step, with what a person wants to know.

    Args:
        record: Knows how long the run will still take.
    """

    SECONDS = 0.1

    def __init__(self, record: RunRecord | None = None) -> None:
        super().__init__()
        self.record = record
        self._drawn = 0.0

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Show what is going on, how far it is, and the figures; time left is of the whole run."""
        room = shutil.get_terminal_size().columns - 76  # what the rest takes at its longest
        bar = CustomBarColumn(bar_width=max(4, min(24, room)))
        return [TextColumn("{task.description}"), bar, TextColumn("{task.completed}/{task.total}")]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the last written point: nothing is computed, and no device waited for, to show it."""
        shown: dict[str, Any] = {}
        if point := getattr(pl_module, "last_point", None):
            shown |= {"loss": f"{point['train/loss']:.3f}", "accuracy": f"{point['train/accuracy']:.4f}"}
        if self.record is not None and trainer.training:
            if self.record.images_per_second:
                shown["images/s"] = f"{self.record.images_per_second:,.0f}"
            if (left := self.record.seconds_left(trainer)) is not None:
                shown["left"] = clock(left)
        logged: dict[str, Any] = trainer.progress_bar_metrics  # by a module of the user's
        return shown | {name: v.item() if isinstance(v, torch.Tensor) else v for name, v in logged.items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Draw it, when it is time, or the epoch's last."""
        now = time.perf_counter()
        if now - self._drawn >= self.SECONDS or is_end_of_epoch(trainer):
            self._drawn = now
            super().on_train_batch_end(trainer, pl_module, *args)

    def _get_train_description(self, current_epoch: int) -> str:
        return epoch_of(self.trainer)

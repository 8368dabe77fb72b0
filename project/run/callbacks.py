"""Callbacks of every run: how fast it goes, what each epoch came to, one line about it, and a bar that costs nothing."""

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from project.model.classifier import is_end_of_epoch, is_writing_step


class RunRecord(Callback):
    """Measure the training speed, remember each epoch's validation figures, and print one line an epoch.

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
        self.train_seconds = 0.0
        self.epoch_seconds = 0.0
        self.num_images = 0
        self.validations: list[tuple[int, float, float]] = []
        self._run_start = self._epoch_start = self._window_start = 0.0
        self._window_images = self._epoch_images = 0
        self._pause_start = 0.0
        self._restored: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the run's clock, and an epoch's, in case that this run goes on inside one."""
        now = time.perf_counter()
        self._begin_epoch()
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
        """Add the figures so far."""
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
        self._window_images += len(batch[1]) * trainer.world_size
        if is_writing_step(trainer, batch_idx):
            now = time.perf_counter()
            speed = self._window_images / (now - self._window_start)
            for logger in trainer.loggers:
                logger.log_metrics({"images_per_second": speed, "epoch": trainer.current_epoch}, trainer.global_step - 1)
            self._epoch_images += self._window_images
            self._window_images, self._window_start = 0, now

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
            parts = [f"epoch {epoch + 1}/{trainer.max_epochs}"] if (trainer.max_epochs or -1) > 0 else [f"epoch {epoch + 1}"]
            figures = trainer.callback_metrics
            if "train/loss" in figures:
                parts.append(f"train loss {figures['train/loss']:.3f} accuracy {figures['train/accuracy']:.4f}")
            if self.validations and self.validations[-1][0] == epoch:
                parts.append("val loss {1:.3f} accuracy {2:.4f}".format(*self.validations[-1]))
            parts.append(f"{self._epoch_images / seconds:,.0f} images/s")
            bar = trainer.progress_bar_callback  # prints above itself, where there is one
            (bar.print if bar else print)("  ".join(parts))
            sys.stdout.flush()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the run's clock."""
        self.num_steps = trainer.global_step
        self.train_seconds = time.perf_counter() - self._run_start

    def _begin_epoch(self) -> None:
        self._epoch_start = self._window_start = time.perf_counter()
        self._window_images = self._epoch_images = 0


class ProgressBar(RichProgressBar):
    """Lightning's bar, drawn ten times a second instead of at every step."""

    SECONDS = 0.1

    def __init__(self) -> None:
        super().__init__()
        self._drawn = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Draw it, when it is time, or the epoch's last."""
        now = time.perf_counter()
        if now - self._drawn >= self.SECONDS or is_end_of_epoch(trainer):
            self._drawn = now
            super().on_train_batch_end(trainer, pl_module, *args)

"""What TensorBoard shows of a run besides its curves: pictures, the network's graph, the configuration and the command."""

import io
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from copy import copy
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn

from project.model.classifier import is_writing_step
from project.model.evaluation import Findings
from project.run.callbacks import RunRecord
from project.run.drawing import as_png, captioned, confusion_matrix, legible
from project.run.outputs import RunDirectory
from project.run.summary import versions

IMAGES_SHOWN = 32  # of a training batch


class Board(Callback):
    """Show what a person looks at beside the curves; between the ends of epochs it costs nothing.

    A training batch as the network sees it, and the network's graph, with the first point of the run; the confusion matrix
    and the worst mistakes of every validation and of the test; what was run, and with which settings.

    Args:
        record: Its clocks stand still meanwhile.
        run: The run directory, whose configuration is shown; None for none.
    """

    def __init__(self, record: RunRecord, run: RunDirectory | None = None) -> None:
        self.record = record
        self.run = run
        self._shown = False  # the first batch and the graph

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what a run that is continued need not show again."""
        checkpoint["board"] = {"shown": self._shown}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on from there."""
        if trainer.state.fn == "fit" and self.run is not None and self.run.continued is not None:  # a new run shows its own
            self._shown = checkpoint.get("board", {}).get("shown", False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down what is run, and what a learning-rate finder has found."""
        about = "  \n".join(f"{name} {version}" for name, version in versions().items())
        places = f"{trainer.world_size} x {trainer.strategy.root_device.type}"
        step = trainer.global_step
        send_text(trainer.loggers, "command", f"`{shlex.join(sys.argv)}`\n\n{places}  \n{about}", step)
        if self.run is not None and self.run.config:
            send_text(trainer.loggers, "configuration", f"```yaml\n{self.run.config}```", step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateFinder) and callback.optimal_lr is not None and step == 0:
                _send_rates(trainer.loggers, callback.optimal_lr)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the batch of the first point, and the network."""
        if self._shown or not is_writing_step(trainer, batch_idx):
            return
        self._shown = True
        if trainer.is_global_zero:
            with self.record.paused():
                step, network = trainer.global_step - 1, getattr(pl_module, "network", None)
                if _picture_loggers(trainer.loggers) and (picture := _batch(trainer, batch)) is not None:
                    send_picture(trainer.loggers, "train/batch", picture, step)
                images = batch[0] if isinstance(batch, tuple | list) and batch else None
                if isinstance(network, nn.Module) and isinstance(images, Tensor):
                    _send_graph(trainer.loggers, network, images[:1].to(pl_module.dtype))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show what the validation found."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            with self.record.paused():
                self._show_findings(trainer, pl_module, "val", trainer.global_step - 1)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show what the test found."""
        self._show_findings(trainer, pl_module, "test", trainer.global_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down what a profiler has measured."""
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if not isinstance(profiler, PassThroughProfiler) and trainer.is_global_zero and (text := profiler.summary()):
            send_text(trainer.loggers, "profiler", f"```\n{text.strip()}\n```", trainer.global_step)

    @staticmethod
    def _show_findings(trainer: Trainer, pl_module: LightningModule, stage: str, step: int) -> None:
        findings: Findings | None = getattr(pl_module, "findings", {}).get(stage)
        if findings is None or not trainer.is_global_zero or not _picture_loggers(trainer.loggers):
            return
        names = class_names(trainer, len(findings.images_by_class))
        if findings.confusion is not None:
            total, right = int(findings.confusion.sum()), int(findings.confusion.diagonal().sum())
            title = f"{stage}: {right:,} of {total:,} right; rows true, columns predicted"
            send_picture(
                trainer.loggers, f"{stage}/confusion_matrix", confusion_matrix(findings.confusion, names, title), step
            )
        wrong, names = findings.mistakes, legible(names)
        captions = [
            (f"{names[predicted]} {confidence:.3f}", f"true: {names[label]}")
            for predicted, confidence, label in zip(
                wrong.predicted.tolist(), wrong.confidences.tolist(), wrong.labels.tolist(), strict=True
            )
        ]
        title = f"{stage}: the surest mistakes" if captions else f"{stage}: no mistakes"
        picture = captioned(pixels_of(trainer, wrong.images), captions, title, side=96)
        send_picture(trainer.loggers, f"{stage}/worst_mistakes", picture, step)


def class_names(trainer: Trainer, count: int) -> list[str]:
    """Return the names of the classes, or their numbers where the data module does not tell."""
    return list(getattr(trainer.datamodule, "class_names", None) or map(str, range(count)))  # type: ignore[attr-defined]


def pixels_of(trainer: Trainer, images: Tensor) -> Tensor:
    """Return the pixels, uint8 (N, 3, H, W), of what the network saw, float (N, 3, H, W)."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    mean, std = (torch.tensor(getattr(data, name, [other] * 3)) for name, other in (("mean", 0.0), ("std", 1.0)))
    shown = images.cpu().float() * std[:, None, None] + mean[:, None, None]
    return (shown * 255).round().clamp(0, 255).to(torch.uint8)


def send_picture(loggers: Sequence[Logger], tag: str, picture: np.ndarray, step: int) -> None:
    """Send a picture, uint8 (H, W, 3), to every logger that takes some."""
    for logger in _picture_loggers(loggers):
        if isinstance(logger, TensorBoardLogger):
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined] # as add_image does, which takes longer to compress it
                height, width, channels = picture.shape
                png = as_png(picture)
                image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
                summary = Summary(value=[Summary.Value(tag=tag, image=image)])
                logger.experiment.file_writer.add_summary(summary, step)
        else:
            logger.log_image(tag, [picture], step=step)  # type: ignore[attr-defined]


def send_text(loggers: Sequence[Logger], tag: str, text: str, step: int) -> None:
    """Send text, Markdown, to every TensorBoard logger."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, text, step)


def _picture_loggers(loggers: Sequence[Logger]) -> list[Logger]:
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger) or hasattr(logger, "log_image")]


def _batch(trainer: Trainer, batch: Any) -> np.ndarray | None:
    if not (isinstance(batch, tuple | list) and len(batch) > 1):
        return None
    images, labels, *_ = batch
    if not (isinstance(images, Tensor) and images.dim() == 4 and images.shape[1] == 3):  # a module of the user's
        return None
    if not (isinstance(labels, Tensor) and labels.dim() == 1 and labels.dtype == torch.int64):
        return None
    names = legible(class_names(trainer, int(labels.max()) + 1))
    captions = [[names[label]] for label in labels[:IMAGES_SHOWN].tolist()]
    return captioned(pixels_of(trainer, images[:IMAGES_SHOWN]), captions, "as the network sees them", side=96)


def _send_graph(loggers: Sequence[Logger], network: nn.Module, images: Tensor) -> None:
    """Send the network's graph to every TensorBoard logger, as torch traces it with images, float (B, 3, H, W)."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            said = io.StringIO()  # add_graph prints what it raises
            with _evaluating(network), warnings.catch_warnings(), redirect_stdout(said):
                warnings.simplefilter("ignore")  # of the tracer, about what it takes for constant
                try:
                    plain = copy(network)  # the same parts, without what torch.compile has made, which cannot be traced
                    logger.experiment.add_graph(plain, images)
                except Exception as error:  # a network that cannot be traced is one that can be trained
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    failed = f"TensorBoard has no graph of the network, which torch.jit.trace cannot follow ({reason[:200]})"
                else:
                    continue
            warnings.warn(failed, stacklevel=2)


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Leave running averages and random numbers alone meanwhile."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _send_rates(loggers: Sequence[Logger], found: Any) -> None:
    rates, losses = found.results["lr"], found.results["loss"]
    for logger in loggers:
        for step, (rate, loss) in enumerate(zip(rates, losses, strict=False)):
            logger.log_metrics({"lr_finder/learning_rate": rate, "lr_finder/loss": loss}, step)
    suggested = found.suggestion()
    words = "no suggestion: too few points" if suggested is None else f"suggested learning rate: {suggested:g}"
    send_text(loggers, "lr_finder", words, 0)

"""Checkpoints that are safe on disk before they bear their name, and the two that every run keeps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class DurableCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its final place, flush it to the disk, then rename it.

    Lightning's own writer stages in $TMPDIR, and moving from there to another file system is a copy that can be cut off.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save to a path on disk."""
        # step 14: Lightning calls this on rank 0 alone, with names that have no prefix
        write_durably(Path(path), lambda file: torch.save(checkpoint, file))


def write_durably(path: Path, write: Callable[[Any], None]) -> None:
    """Have `write` fill a temporary file in the same folder, flush it to the disk, and give it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def best_and_last(every: int) -> tuple[ModelCheckpoint, ModelCheckpoint]:
    """Return the callbacks that keep `best.ckpt`, by validation accuracy, and `last.ckpt`.

    Args:
        every: Optimizer steps from one `last.ckpt` to the next; 0 for one at the end of every epoch.
    """
    best = ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best", enable_version_counter=False)
    return best, LastCheckpoint(every)


def kept(callback: ModelCheckpoint) -> str | None:
    """Return the file that one of these callbacks keeps, if it is there.

    Its own `best_model_path` will not do: testing a checkpoint brings back what that was when the checkpoint was saved.
    """
    path = Path(callback.dirpath or "", f"{callback.filename}.ckpt")
    return str(path) if callback.dirpath and path.exists() else None


class LastCheckpoint(ModelCheckpoint):
    """Keep `last.ckpt`: every so many optimizer steps, or at the end of every epoch, and always at the end of the run.

    Args:
        every: Optimizer steps from one to the next; 0 for one at the end of every epoch.
    """

    def __init__(self, every: int) -> None:
        super().__init__(
            filename="last",
            every_n_train_steps=every or None,
            every_n_epochs=None if every else 1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.every = every

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the steps since the last time; without `every` the end of the epoch has."""
        if self.every and trainer.global_step % self.every:
            assert self.dirpath is not None
            self.best_model_path = str(Path(self.dirpath) / "last.ckpt")
            trainer.save_checkpoint(self.best_model_path)


class SaveWeights(Callback):
    """Keep the network's weights of every epoch as `weights/epoch_<n>.pth`, as the articles do.

    Each is a plain state_dict, without a prefix: `ConvNet(...).load_state_dict(torch.load(path, weights_only=True))`.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save on rank 0."""
        kept_in = getattr(trainer.checkpoint_callback, "dirpath", None)
        run = Path(kept_in).parent if kept_in else Path(trainer.log_dir or trainer.default_root_dir)  # log_dir: all ranks
        if trainer.is_global_zero:
            path = run / "weights" / f"epoch_{trainer.current_epoch}.pth"
            write_durably(path, lambda file: torch.save(pl_module.network.state_dict(), file))

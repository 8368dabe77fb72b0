"""Callbacks that make one rank fail, in the ways that ranks fail."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from project.data.batches import BatchIndex, ImageBatches
from project.errors import UsageError


class Fail(Callback):
    """Fail on one rank, at one step.

    Args:
        how: "raise", "data", "exit", "vanish", "kill", "kill once", "mistake" or "hang".
        rank: The rank that fails.
        step: The optimizer step.
    """

    def __init__(self, how: str, rank: int = 1, step: int = 5) -> None:
        self.how = how
        self.rank = rank
        self.step = step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.how == "data" and trainer.global_rank == self.rank:
            data = trainer.datamodule
            trainer.train_dataloader.dataset.__class__ = TornImages
            assert isinstance(data.train_batches, ImageBatches)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank != self.rank or trainer.global_step != self.step:
            return
        if self.how == "raise":
            raise ZeroDivisionError("rank fails in its step")
        if self.how == "mistake":
            raise UsageError("--data.root is not on this machine")
        if self.how == "hang":
            print("hanging at step", self.step, flush=True)
            time.sleep(60)
        if self.how == "exit":
            sys.exit(0)
        if self.how == "vanish":
            os._exit(0)
        if self.how == "kill" or (self.how == "kill once" and not Path("killed").exists()):
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class TornImages(ImageBatches):
    """Images that cannot be read."""

    def __getitem__(self, index: BatchIndex) -> Any:
        raise FileNotFoundError("an image is gone")

"""Learning-rate schedules that span the whole run, however long the flags make it."""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from project.errors import UsageError


class LinearDecay(LRScheduler):
    """Fall from the optimizer's learning rates to nothing along a straight line over the whole run.

    Args:
        optimizer: The optimizer.
        total_steps: Optimizer steps of the whole run; None until the trainer knows it.
        last_epoch: As in every PyTorch schedule; counts optimizer steps here.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int | None = None, last_epoch: int = -1) -> None:
        self.total_steps = total_steps
        super().__init__(optimizer, last_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint's schedule stopped.

        Raises:
            UsageError: That one spans another number of steps.
        """
        refuse_other_length(state_dict["total_steps"], self.total_steps)
        super().load_state_dict(state_dict)

    def factor(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0, as a fraction of the first one's."""
        return 1.0 - min(step / self.total_steps, 1.0) if self.total_steps else 1.0

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the coming step."""
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]


class OneCycle(LRScheduler):
    """Rise from a fraction of the optimizer's learning rate to all of it, then fall to nearly nothing; both as a cosine.

    The optimizer's `lr` is the peak. The length is the run's number of optimizer steps: `Classifier` fills in
    `total_steps` before training, so that `--max_epochs` alone sets it (`torch.optim.lr_scheduler.OneCycleLR` wants it
    spelt out, and overrides the optimizer's lr). Source: Smith and Topin, 2018, arXiv:1708.07120.

    Args:
        optimizer: The optimizer, its `lr` the peak.
        warmup: Fraction of the run's steps that rise.
        start: Learning rate of the first step, as a fraction of the peak.
        end: Learning rate after the last step, as a fraction of the peak.
        total_steps: Optimizer steps of the whole run; None until the trainer knows it.
        last_epoch: As in every PyTorch schedule; counts optimizer steps here.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0.2,
        start: float = 0.04,
        end: float = 0.0001,
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup < 1:
            raise UsageError(f"--lr_scheduler.warmup {warmup} must be at least 0 and below 1: it is a fraction of the run")
        self.warmup = warmup
        self.start = start
        self.end = end
        self.total_steps = total_steps
        super().__init__(optimizer, last_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint's schedule stopped.

        Raises:
            UsageError: That one spans another number of steps.
        """
        refuse_other_length(state_dict["total_steps"], self.total_steps)
        super().load_state_dict(state_dict)

    def factor(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0, as a fraction of the peak."""
        done = min(step / self.total_steps, 1.0) if self.total_steps else 0.0
        if done < self.warmup:
            return _cosine(self.start, 1.0, done / self.warmup)
        return _cosine(1.0, self.end, (done - self.warmup) / (1.0 - self.warmup))

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the coming step."""
        factor = self.factor(self.last_epoch)
        return [peak * factor for peak in self.base_lrs]


def _cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) * (1.0 + math.cos(math.pi * done)) / 2.0


def refuse_other_length(before: int, now: int | None) -> None:
    """Refuse to continue a schedule over another number of optimizer steps.

    Raises:
        UsageError: The lengths differ.
    """
    if now and now != before:
        raise UsageError(
            f"--max_epochs: the checkpoint's learning rate falls over {before} optimizer steps, this command's over"
            f" {now}; give it the same length, or start a new run without --resume"
            " (one that is to be made longer later wants a schedule without an end, as --lr_scheduler null)"
        )

"""Learning-rate schedules that span the whole run, however long the flags make it."""

import math
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from project.errors import UsageError


class OverTheRun(LRScheduler, ABC):
    """A schedule over the whole run, a function of the share of its optimizer steps that is done.

    `Classifier` fills in `total_steps` before training, so that `--max_epochs` alone sets the length (the schedules of
    torch.optim want it spelt out).

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
        steps = state_dict["total_steps"]
        if self.total_steps and self.total_steps != steps:
            raise UsageError(
                f"--max_epochs: the checkpoint's learning rate falls over {steps} optimizer steps, this command's over"
                f" {self.total_steps}; give it the same length, or start a new run without --resume"
                " (one that is to be made longer later wants a schedule without an end, as --lr_scheduler null)"
            )
        super().load_state_dict(state_dict)

    @abstractmethod
    def factor(self, done: float) -> float:
        """Return the learning rate as a fraction of the optimizer's, where a share of the steps is done, 0 to 1."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each parameter group for the coming step."""
        factor = self.factor(min(self.last_epoch / self.total_steps, 1.0) if self.total_steps else 0.0)
        return [rate * factor for rate in self.base_lrs]


class LinearDecay(OverTheRun):
    """Fall from the optimizer's learning rates to nothing along a straight line over the whole run.

    Args:
        optimizer: The optimizer.
        total_steps: Optimizer steps of the whole run; None until the trainer knows it.
        last_epoch: As in every PyTorch schedule; counts optimizer steps here.
    """

    def factor(self, done: float) -> float:
        """Return the learning rate as a fraction of the first step's."""
        return 1.0 - done


class OneCycle(OverTheRun):
    """Rise from a fraction of the optimizer's learning rate to all of it, then fall to nearly nothing; both as a cosine.

    The optimizer's `lr` is the peak (`torch.optim.lr_scheduler.OneCycleLR` overrides it). Source: Smith and Topin, 2018,
    arXiv:1708.07120.

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
        super().__init__(optimizer, total_steps, last_epoch)

    def factor(self, done: float) -> float:
        """Return the learning rate as a fraction of the peak."""
        if done < self.warmup:
            return _cosine(self.start, 1.0, done / self.warmup)
        return _cosine(1.0, self.end, (done - self.warmup) / (1.0 - self.warmup))


def _cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) * (1.0 + math.cos(math.pi * done)) / 2.0

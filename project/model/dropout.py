"""Dropout that drops the same of every image, however many devices share the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from project.data.augment import generator
from project.errors import UsageError


class Dropout(nn.Module):
    """Set features to zero at random while training, and scale up the rest, as `torch.nn.Dropout` does.

    What is dropped depends on the seed, the step and the image's place in the global batch. `torch.nn.Dropout` works in
    the Classifier too, and is repeated exactly by a resumed run, but drops other features on another number of devices.
    The draws are made on the CPU, so that they are the same everywhere.

    Args:
        p: Probability of each feature to be dropped.

    Raises:
        UsageError: It is not a probability below 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise UsageError(f"dropout {p} must be at least 0 and below 1")
        self.p = p
        self.key: Sequence[int] | None = None  # of this step's draws; None outside a Classifier
        self.batch_size = 0  # images in the global batch
        self.rows = slice(None)  # this device's images among them
        self.calls = 0  # in this step; a layer may be used twice

    def begin_step(self, key: Sequence[int], batch_size: int, rows: slice) -> None:
        """Say what the coming forward pass is a part of.

        Args:
            key: Numbers that no other layer and no other step has.
            batch_size: Images in the global batch.
            rows: This device's images among them.
        """
        self.key, self.batch_size, self.rows, self.calls = key, batch_size, rows, 0

    def forward(self, features: Tensor) -> Tensor:
        """Map features, float (B, ...), to features of the same shape."""
        if not self.training or self.p == 0:
            return features
        if self.key is None or len(range(self.batch_size)[self.rows]) != len(features):  # no part of a training step
            return nn.functional.dropout(features, self.p)
        stream = generator(*self.key[:-1], self.calls, self.key[-1])
        self.calls += 1
        draws = torch.rand(self.batch_size, *features.shape[1:], generator=stream)[self.rows]
        kept = (draws >= self.p).to(features.device)
        return features * kept / (1 - self.p)

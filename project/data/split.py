"""Which of the training images are kept for validation."""

import torch
from torch import Tensor

from project.data.augment import generator


def split_by_class(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split off the same share of every class at random.

    Args:
        labels: int64 (n,).
        fraction: Share of each class for the second part, rounded to whole images; one at least stays in the first.
        seed: Another seed, another split; the same on every process.

    Returns:
        The positions of the two parts, int64, ascending and disjoint.
    """
    kept, split_off = [], []
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator(seed, int(label), 2))]
        count = num_split_off(len(members), fraction)
        split_off.append(members[:count])
        kept.append(members[count:])
    return torch.cat(kept).sort().values, torch.cat(split_off).sort().values


def num_split_off(count: int, fraction: float) -> int:
    """Return how many of a class's images are split off."""
    return min(round(fraction * count), count - 1)

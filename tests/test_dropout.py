"""Our dropout drops the same of every image on any number of devices."""

import pytest
import torch

from project.errors import UsageError
from project.model.dropout import Dropout


def drop(features: torch.Tensor, rows: slice, batch_size: int, key: tuple[int, ...] = (0, 1, 2, 4)) -> torch.Tensor:
    layer = Dropout(0.3)
    layer.begin_step(key, batch_size, rows)
    return layer(features)


def test_each_part_of_a_batch_loses_what_it_loses_in_the_whole() -> None:
    features = torch.rand(12, 4, 3, 3) + 1
    whole = drop(features, slice(None), 12)
    for ranks in (2, 3, 4):
        for rank in range(ranks):  # ddp deals the images out, dp cuts the batch up
            dealt = slice(rank, None, ranks)
            cut = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
            for rows in (dealt, cut):
                assert torch.equal(drop(features[rows], rows, 12), whole[rows])


def test_it_drops_its_share_keeps_the_mean_and_differs_from_key_to_key() -> None:
    ones = torch.ones(64, 1000)
    dropped = drop(ones, slice(None), 64)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(dropped, drop(ones, slice(None), 64, key=(0, 2, 2, 4)))


def test_outside_training_and_at_zero_it_does_nothing() -> None:
    features = torch.rand(3, 5)
    assert Dropout(0.0)(features) is features
    assert Dropout(0.5).eval()(features) is features
    assert (Dropout(0.5)(torch.ones(1000)) == 0).any()  # outside a Classifier it draws as torch's own does


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_a_share_that_cannot_be_is_refused(p: float) -> None:
    with pytest.raises(UsageError, match=f"dropout {p} must be"):
        Dropout(p)

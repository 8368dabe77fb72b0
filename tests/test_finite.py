"""Gradients that are not finite are found, whatever they are made of, and left as they were."""

import pytest
import torch

from project.model.classifier import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    gradients = [torch.randn(3, 4).to(dtype), torch.randn(5), torch.zeros(0)]
    assert all_finite(gradients)
    gradients[0][2, 1] = bad
    assert not all_finite(gradients)


def test_gradients_are_left_as_they_were_to_the_last_bit() -> None:
    gradient = torch.tensor([-0.0, 1e-45, 3.4e38, 0.1])
    before = gradient.clone()
    assert all_finite([gradient])
    assert torch.equal(gradient.view(torch.int32), before.view(torch.int32))

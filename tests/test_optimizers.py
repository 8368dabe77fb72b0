"""Muon orthogonalises the steps of convolutions, and is SGD for everything else."""

import pytest
import torch
from torch import nn

from project.model.optimizers import Muon, orthogonalised
from project.model.schedules import LinearDecay


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((8, 4, 3, 3), (5, 8), (8,))]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("shape", [(64, 64), (64, 576), (256, 24)])
def test_singular_values_come_near_1_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result = left.T @ orthogonalised(matrix, 3) @ right.T
    inside = values > 0.2 * values.max()  # the smallest ones take more iterations
    assert result.diagonal()[inside].min() > 0.4
    assert result.diagonal().max() < 1.3
    assert (result - result.diagonal().diag()).abs().max() < 0.05


def test_a_convolutions_step_is_orthogonal_from_a_weight_of_one_norm() -> None:
    weight, *_ = ours = parameters()
    optimizer = Muon(ours, lr=0.1, momentum=0.5)
    before = weight.detach().clone()
    give_gradients(ours, 1)
    optimizer.step()
    step = (before * 8**0.5 / before.norm() - weight).flatten(1) / 0.1
    assert torch.linalg.svdvals(step).min() > 0.3
    assert torch.linalg.svdvals(step).max() < 1.3


def test_convolutions_have_nesterovs_momentum_before_the_orthogonalisation() -> None:
    weight, *_ = ours = parameters()
    optimizer = Muon(ours, lr=0.1, momentum=0.5)
    expected, velocity = weight.detach().clone(), torch.zeros_like(weight)
    for seed in range(3):
        give_gradients(ours, seed)
        velocity = 0.5 * velocity + weight.grad
        direction = orthogonalised((weight.grad + 0.5 * velocity).flatten(1), 3).view_as(weight)
        expected = expected * 8**0.5 / expected.norm() - 0.1 * direction
        optimizer.step()
    assert torch.allclose(weight, expected, rtol=1e-12)


def test_the_rest_is_torchs_sgd_with_nesterovs_momentum() -> None:
    ours, theirs = parameters(), parameters()
    muon = Muon(ours, head_lr=0.3, bias_lr=0.2, sgd_momentum=0.8, weight_decay=0.01)
    groups = [
        {"params": theirs[1:2], "lr": 0.3, "weight_decay": 0.01 / 0.3},
        {"params": theirs[2:], "lr": 0.2, "weight_decay": 0.01 / 0.2},
    ]
    sgd = torch.optim.SGD(groups, lr=1.0, momentum=0.8, nesterov=True)
    for seed in range(5):
        for optimizer, group in ((muon, ours), (sgd, theirs)):
            give_gradients(group, seed)
            optimizer.step()
    for mine, its in zip(ours[1:], theirs[1:], strict=True):
        assert torch.allclose(mine, its, rtol=1e-12)


def test_a_frozen_weight_is_left_out() -> None:
    weight, *rest = parameters()
    weight.requires_grad_(False)
    assert [len(group["params"]) for group in Muon([weight, *rest]).param_groups] == [1, 1]


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"bias_lr": -1.0}, {"iterations": 0}])
def test_a_setting_out_of_range_is_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Muon(parameters(), **wrong)


def test_every_rate_falls_to_nothing_along_a_line() -> None:
    optimizer = Muon(parameters(), lr=0.4, head_lr=8.0, bias_lr=2.0)
    schedule = LinearDecay(optimizer, total_steps=4)
    rates = []
    for _ in range(4):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert torch.allclose(torch.tensor(rates), torch.tensor([[1.0], [0.75], [0.5], [0.25]]) * torch.tensor([0.4, 8.0, 2.0]))
    assert optimizer.param_groups[0]["lr"] == 0

"""Optimizers that torch does not have."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Of the quintic that pushes singular values towards 1, steepest at 0. Source: Keller Jordan et al., 2024, "Muon".
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Orthogonalised momentum for convolutions' weights, SGD with Nesterov's momentum for everything else.

    A step of a convolution's weight has singular values of about 1, times `lr`; before it the weight is scaled to one norm,
    which suits weights that a BatchNorm follows. The rest is told apart by shape: matrices are the head, vectors biases.

    Args:
        params: Parameters; weights of four dimensions are convolutions'.
        lr: Length of a convolution's step; the learning rate that is logged and scheduled.
        momentum: Of the convolutions.
        head_lr: Learning rate of the matrices.
        bias_lr: Learning rate of the vectors.
        sgd_momentum: Of matrices and vectors.
        weight_decay: Of matrices and vectors, for each step at the full rate: it adds weight_decay / lr times the parameter
            to the gradient, so that, through the momentum, a step takes away weight_decay / (1 - sgd_momentum) of it.
        iterations: Newton-Schulz steps of the orthogonalisation.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.24,
        momentum: float = 0.6,
        head_lr: float = 0.1,
        bias_lr: float = 0.1,
        sgd_momentum: float = 0.85,
        weight_decay: float = 0.0,
        iterations: int = 3,
    ) -> None:
        for name, value in {"lr": lr, "head_lr": head_lr, "bias_lr": bias_lr, "weight_decay": weight_decay}.items():
            if value < 0:
                raise ValueError(f"{name} {value} must be at least 0")
        for name, value in {"momentum": momentum, "sgd_momentum": sgd_momentum}.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} {value} must be at least 0 and below 1")
        if iterations < 1:
            raise ValueError(f"iterations {iterations} must be at least 1")
        by_rank: dict[int, list[nn.Parameter]] = {4: [], 2: [], 1: []}
        for parameter in params:
            if parameter.requires_grad:
                by_rank[4 if parameter.ndim == 4 else 2 if parameter.ndim > 1 else 1].append(parameter)
        groups: list[dict[str, Any]] = [{"params": by_rank[4], "lr": lr, "momentum": momentum, "orthogonal": True}]
        for rank, rate in ((2, head_lr), (1, bias_lr)):
            decay = weight_decay / rate if rate else 0.0
            groups.append({"params": by_rank[rank], "lr": rate, "momentum": sgd_momentum, "weight_decay": decay})
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "orthogonal": False, "iterations": iterations}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what the closure, which computes the gradients, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not group["orthogonal"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        step = gradient.add(velocity, alpha=group["momentum"])  # Nesterov's
        if group["orthogonal"]:
            parameter.mul_(len(parameter) ** 0.5 / parameter.norm().clamp_min(1e-12))
            step = orthogonalised(step.flatten(1), group["iterations"]).view_as(step)
        parameter.add_(step, alpha=-group["lr"])


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """Return the matrix with its singular values brought near 1, by Newton-Schulz iterations in bfloat16.

    Args:
        matrix: (M, N), any float type.
        iterations: Three bring most singular values into 0.5 to 1.5.
    """
    a, b, c = COEFFICIENTS
    x: Tensor = matrix.bfloat16()
    x = x / (x.norm() + 1e-7)  # the largest singular value is then at most 1
    if transposed := len(x) > x.shape[1]:
        x = x.T
    for _ in range(iterations):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return (x.T if transposed else x).to(matrix.dtype)

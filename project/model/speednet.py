"""The network of configs/speed.yaml, for high accuracy on CIFAR-10 with little computation: a second network."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from project.errors import UsageError


class SpeedNet(nn.Module):
    """Whitened patches, three groups of two 3x3 convolutions, and a linear layer; at test time an average over six views.

    Source of the architecture: Keller Jordan, 2024, arXiv:2404.00498 (airbench94); written anew here.

    Args:
        widths: Output channels of the three groups.
        num_classes: Number of logits. The command line takes it from the data.
        image_size: Height and width of the images in pixels, at least 9. The command line takes it from the data.
        unsure_below: Outside of training (in every validation, test and prediction), images whose best class has less than
            this probability are looked at in six views, and the logits averaged; 0 for none, 1 for all.

    Raises:
        UsageError: A size that cannot work, by name.
    """

    def __init__(
        self,
        widths: tuple[int, int, int] = (64, 256, 256),
        num_classes: int = 10,
        image_size: int = 32,
        unsure_below: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("widths", min(widths), 1),
            ("num_classes", num_classes, 2),
            ("image_size", image_size, 9),
        ):
            if value < least:
                raise UsageError(f"--model.network.{name} {value} must be at least {least}")
        if not 0 <= unsure_below <= 1:
            raise UsageError(f"--model.network.unsure_below {unsure_below} is a probability: give a number from 0 to 1")
        self.unsure_below = unsure_below
        # A patch has 12 values: a filter for each combination of them, and one for its negative.
        # Its bias stays at its random initial value: training it costs the gradient of the largest images, and a parameter
        # that is trained for a part of the run only would need a part of its own in ddp.
        self.whiten = nn.Conv2d(3, 24, kernel_size=2).requires_grad_(False)
        self.whitened: Tensor
        self.register_buffer("whitened", torch.tensor(0))  # 1 once it is; weights that are loaded bring it along
        self.groups = nn.Sequential(*(_Group(*ends) for ends in zip((24, *widths), widths, strict=False)))
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.normal_(self.head.weight)

    def look_at(self, images: Tensor) -> None:
        """Make the first convolution's outputs uncorrelated over the patches of training images, float (N, 3, H, W)."""
        if self.whitened:
            return
        products, count = torch.zeros(12, 12, dtype=torch.float64), 0
        for some in images.double().split(100):
            patches = some.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
            products, count = products + patches.T @ patches, count + len(patches)
        values, vectors = torch.linalg.eigh(products / count)
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)  # 5e-4: noise is not blown up
        with torch.no_grad():
            self.whiten.weight.copy_(torch.cat([filters, -filters]))
            self.whitened.fill_(1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float (B, 3, H, W), to logits (B, num_classes)."""
        if self.training or self.unsure_below == 0:
            return self._logits(images)
        logits = _wide(self._logits(images))
        if self.unsure_below == 1:
            return self._average(images, logits)
        unsure = logits.softmax(dim=1).amax(dim=1) < self.unsure_below
        if torch.compiler.is_exporting():  # what a program does cannot depend on the images: all are looked at
            return torch.where(unsure[:, None], self._average(images, logits), logits)
        if unsure.any():
            logits[unsure] = self._average(images[unsure], logits[unsure])
        return logits

    def _average(self, images: Tensor, logits: Tensor) -> Tensor:
        """Return the mean over the views: a half for the image where it is, a quarter for each of its shifts."""
        height, width = images.shape[2:]
        padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
        result = (logits + _wide(self._logits(images.flip(3)))) / 4
        for row, column in ((0, 0), (2, 2)):
            shifted = padded[:, :, row : row + height, column : column + width]
            result += (_wide(self._logits(shifted)) + _wide(self._logits(shifted.flip(3)))) / 8
        return result

    def _logits(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        features: Tensor = self.pool(self.groups(functional.gelu(self.whiten(images)))).flatten(1)
        logits: Tensor = self.head(features) / features.shape[1]
        return logits


def _wide(logits: Tensor) -> Tensor:
    """Return logits in at least float32, for sums of them."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class _Group(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _Conv3x3(before, after), _norm(after)
        self.conv2, self.norm2 = _Conv3x3(after, after), _norm(after)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.norm1(functional.max_pool2d(self.conv1(x), 2)))
        return functional.gelu(self.norm2(self.conv2(x)))


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm whose statistics follow fast and whose scale stays 1: the weights before it have none."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


class _Conv3x3(nn.Conv2d):
    """A 3x3 convolution that begins by handing its input on, and whose weights' gradient is fast on a CPU."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after, kernel_size=3, padding=1, bias=False)
        nn.init.dirac_(self.weight.data[: min(before, after)])

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.bfloat16 and self.in_channels >= 128 and torch.is_grad_enabled():
            return _FastWeightGradient.apply(x, self.weight.to(x.dtype))  # type: ignore[no-any-return]
        return super().forward(x)


class _FastWeightGradient(torch.autograd.Function):
    """A 3x3 convolution whose weights' gradient is one matrix product over the gathered patches.

    oneDNN's own takes 2 to 5 times as long with 256 channels on 3x3 and 7x7 pixels in bfloat16 (torch 2.14.1, AMX).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        before, after = x.shape[1], weight.shape[0]
        height, width = x.shape[2:]
        padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))  # (B, H + 2, W + 2, C)
        step = padded.stride()
        patches = padded.as_strided((len(x), height, width, 3, 3 * before), (*step[:3], step[1], 1)).reshape(-1, 9 * before)
        of_weight = gradient.permute(0, 2, 3, 1).reshape(-1, after).T.contiguous() @ patches  # a tenth faster laid out anew
        of_x = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
        )[0]
        return of_x, of_weight.view(after, 3, 3, before).permute(0, 3, 1, 2)

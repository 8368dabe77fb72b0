"""From pixels to a network's input."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Normalization:
    """Turns pixels, uint8 (B, 3, H, W), into a network's input, float32 (B, 3, H, W), channels last in memory.

    Args:
        mean: Of red, green and blue, in 0..1; pixels / 255 have it subtracted.
        std: The same, and are divided by it.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = mean, std
        self._offset = self._scale = torch.empty(0)  # of a row of pixels, once the first has been seen

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise a batch, on its device."""
        batch, channels, height, width = images.shape
        if self._scale.device != images.device or len(self._scale) != width * channels:
            self._offset, self._scale = (
                255 * torch.tensor(figures, dtype=torch.float32, device=images.device).repeat(width)
                for figures in (self.mean, self.std)
            )
        pixels = torch.empty(batch, height, width, channels, dtype=torch.float32, device=images.device)
        scaled = pixels.permute(0, 3, 1, 2)
        for channel in range(channels):  # on a CPU torch copies all at once, or subtracts three numbers, ten times as slowly
            scaled[:, channel] = images[:, channel]
        pixels.view(-1, width * channels).sub_(self._offset).div_(self._scale)
        return scaled

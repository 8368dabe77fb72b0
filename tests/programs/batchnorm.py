"""A network with BatchNorm."""

from torch import Tensor, nn


class WithBatchNorm(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 30 * 30, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

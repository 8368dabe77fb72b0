"""The networks: plain `nn.Module`s that map images to logits and know nothing of Lightning."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from project.errors import UsageError
from project.model.dropout import Dropout

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "none": nn.Identity}


class ConvNet(nn.Module):
    """The articles' conv classifier at any width: six 5x5 convolutions, three max-pools, three linear layers.

    With `channels=(32, 64, 512, 1024, 2048, 4096)`, `hidden=5000` and `activation="none"` it is exactly theirs, with
    604,137,490 parameters (800,940,490 with `hidden=8000`).

    Args:
        channels: Output channels of the six convolutions.
        hidden: Width of the first linear layer; the second is always 64, as in the articles.
        num_classes: Number of logits. The command line takes it from the data.
        activation: Follows every convolution and every linear layer but the last. "none" is the articles' choice, and
            leaves a network that is linear but for its max-pools.
        image_size: Height and width of the images in pixels, at least 8. The command line takes it from the data.
        dropout: Share of the convolutions' features dropped while training; 0, as in the articles, for none.

    Raises:
        UsageError: A size that cannot work, by name.
    """

    def __init__(
        self,
        channels: Sequence[int] = (16, 16, 32, 32, 64, 64),
        hidden: int = 128,
        num_classes: int = 10,
        activation: Literal["relu", "gelu", "none"] = "relu",
        image_size: int = 32,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(channels) != 6 or min(channels) < 1:
            raise UsageError(
                f"--model.network.channels {list(channels)} must be six numbers of at least 1, one for each convolution"
            )
        if activation not in ACTIVATIONS:
            raise UsageError(f"--model.network.activation {activation} is not one of {', '.join(ACTIVATIONS)}")
        for name, value, least in (("hidden", hidden, 1), ("num_classes", num_classes, 2), ("image_size", image_size, 8)):
            if value < least:
                raise UsageError(f"--model.network.{name} {value} must be at least {least}")

        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(zip((3, *channels), channels, strict=False)):
            layers += [nn.Conv2d(before, after, kernel_size=5, padding=2), ACTIVATIONS[activation]()]
            if number in (2, 3, 5):
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.dropout = Dropout(dropout)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels[-1] * (image_size // 8) ** 2, hidden),
            ACTIVATIONS[activation](),
            nn.Linear(hidden, 64),
            ACTIVATIONS[activation](),
            nn.Linear(64, num_classes),
        )
        if activation != "none":  # "none" keeps PyTorch's initialisation, which the articles use
            self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float (B, 3, H, W), to logits (B, num_classes)."""
        logits: Tensor = self.head(self.dropout(self.features(images)))
        return logits


def _initialise(module: nn.Module) -> None:
    """Keep the variance of the activations through the ReLUs. Source: He et al., 2015, arXiv:1502.01852."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)

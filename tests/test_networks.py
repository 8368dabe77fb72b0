"""The network is the articles' at any width."""

import pytest
import torch

from project.errors import UsageError
from project.model.networks import ConvNet

ARTICLES = (32, 64, 512, 1024, 2048, 4096)


@pytest.mark.parametrize(("hidden", "parameters"), [(5000, 604_137_490), (8000, 800_940_490)])
def test_the_articles_network_has_their_number_of_parameters(hidden: int, parameters: int) -> None:
    with torch.device("meta"):
        network = ConvNet(ARTICLES, hidden, activation="none")
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_without_activation_only_the_max_pools_are_not_linear() -> None:
    kinds = [type(module).__name__ for module in ConvNet(activation="none").modules()]
    assert {"ReLU", "GELU"}.isdisjoint(kinds)
    assert kinds.count("Conv2d") == 6
    assert kinds.count("MaxPool2d") == 3
    assert kinds.count("Linear") == 3


def test_without_activation_the_initial_weights_are_pytorchs_own() -> None:
    torch.manual_seed(0)
    ours = ConvNet(activation="none").features[0].weight
    torch.manual_seed(0)
    assert torch.equal(ours, torch.nn.Conv2d(3, 16, 5, padding=2).weight)


@pytest.mark.parametrize(("image_size", "num_classes"), [(8, 2), (32, 10), (50, 7), (64, 100)])
def test_any_image_size_and_number_of_classes(image_size: int, num_classes: int) -> None:
    network = ConvNet(num_classes=num_classes, image_size=image_size)
    assert network(torch.zeros(3, 3, image_size, image_size)).shape == (3, num_classes)


@pytest.mark.parametrize("wrong", [{"channels": (1, 2)}, {"hidden": 0}, {"num_classes": 1}, {"image_size": 4}])
def test_a_size_that_cannot_work_is_named(wrong: dict) -> None:
    name = next(iter(wrong))
    with pytest.raises(UsageError, match=f"--model.network.{name}"):
        ConvNet(**wrong)

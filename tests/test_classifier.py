"""The LightningModule around any network."""

import pytest
import torch
from torch import nn

from project.errors import UsageError
from project.model.classifier import Classifier


def test_a_network_with_the_wrong_number_of_outputs_is_named() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 7)), num_classes=10)
    with pytest.raises(UsageError, match=r"--model.network Sequential returns \[2, 7\] .* must return \[2, 10\]"):
        model(torch.zeros(2, 3, 8, 8))


def test_probabilities_add_up_to_one() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)))
    probabilities = model.predict_step((torch.rand(2, 3, 8, 8), torch.zeros(2)), 0)
    assert probabilities.sum(dim=1).tolist() == pytest.approx([1, 1])

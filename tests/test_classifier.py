"""The LightningModule around any network."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from project.data.datamodule import ImageDataModule
from project.errors import UsageError
from project.model.classifier import PLAIN_ATTRIBUTES, Classifier
from project.model.networks import ConvNet
from tests.conftest import ImageFolder


def test_a_network_with_the_wrong_number_of_outputs_is_named() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 7)), num_classes=10)
    with pytest.raises(UsageError, match=r"--model.network Sequential returns \[2, 7\] .* must return \[2, 10\]"):
        model(torch.zeros(2, 3, 8, 8))


def test_probabilities_add_up_to_one() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)))
    probabilities = model.predict_step((torch.rand(2, 3, 8, 8), torch.zeros(2)), 0)
    assert probabilities.sum(dim=1).tolist() == pytest.approx([1, 1])


def test_what_the_lean_step_leaves_out_is_still_where_lightning_has_it() -> None:
    """These are private to Lightning; where it changes them, what we do about them must change too."""
    assert not isinstance(inspect.getattr_static(LightningModule, "_current_fx_name", None), property)
    assert Classifier(ConvNet())._current_fx_name is None


def test_lightning_sees_the_steps_true_arguments() -> None:
    def plain(self: Any, batch: Any, batch_idx: int) -> None: ...

    assert inspect.getfullargspec(Classifier(ConvNet()).training_step).args == inspect.getfullargspec(plain).args


def test_an_attribute_that_is_set_in_every_step_is_no_parameter_buffer_or_module() -> None:
    module = Classifier(ConvNet())
    known = {name for name, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_modules())}
    assert not known & PLAIN_ATTRIBUTES
    module._loss = loss = torch.tensor(1.0)
    assert module._loss is loss


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "--model.num_classes 10: the images have 2 classes"),
        ({"class_names": ["class0", "class1"]}, "--data.class_names is for evaluation"),
    ],
)
def test_what_would_fail_only_after_the_training_is_refused_before_it(
    settings: dict[str, Any], words: str, image_folder: ImageFolder, tmp_path: Path
) -> None:
    root = image_folder([6, 6], [2, 2])
    data = ImageDataModule("folder", str(root), batch_size=4, cache_dir=str(tmp_path), **settings)
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(UsageError, match=words):
        trainer.fit(Classifier(ConvNet()), data)

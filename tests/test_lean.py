"""What is taken out of Lightning's step changes nothing that anybody sees."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors import data_connector
from torch import nn
from torch.utils.data import DataLoader

from project.errors import RunError
from project.model.classifier import Classifier
from project.run.lean import LeanSteps

BATCHES = [(torch.rand(4, 3, 8, 8), torch.arange(4))] * 6


def fit(module: Classifier, *callbacks: Callback, steps: int = 6) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[LeanSteps(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(BATCHES, batch_size=None)
    trainer.fit(module, loader, loader)


def classifier(**settings: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)), lr_scheduler=None, **settings)


class Counting(Callback):
    def __init__(self) -> None:
        self.called: list[str] = []

    def on_before_zero_grad(self, *args: Any) -> None:
        self.called.append("the class's")


def test_a_callbacks_own_hooks_are_called_in_every_step_be_they_the_classs_or_the_instances() -> None:
    counting, other = Counting(), Callback()
    counting.on_after_backward = lambda *args: counting.called.append("the instance's")  # type: ignore[method-assign]
    fit(classifier(), counting, other)
    assert counting.called == ["the class's", "the instance's"] * 6
    assert other.on_after_backward is None  # which Lightning passes over


def test_whose_hook_it_is_is_not_found_out_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = data_connector.is_overridden
    monkeypatch.setattr(data_connector, "is_overridden", lambda *args: asked.append(args) or real(*args))
    counts = []
    for steps in (2, 6):
        asked.clear()
        fit(classifier(), steps=steps)
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


def test_lightning_still_asks_the_other_ranks_where_it_is_kept_from_it() -> None:
    """It is private to Lightning; where that changes it, what we do about it must change too."""
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)


@pytest.mark.parametrize("limit", [None, 3.0])
def test_the_norm_of_gradients_that_are_not_finite_is_told_as_it_was(limit: float | None) -> None:
    module = classifier(max_grad_norm=limit)
    module.network[1].weight.register_hook(lambda gradient: gradient + float("inf"))  # type: ignore[union-attr, index, operator]
    with pytest.raises(RunError, match=r"step 0: loss 2\.\d+, norm of the gradients inf"):
        fit(module)

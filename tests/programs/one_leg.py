"""Train from a checkpoint, if it is there, to the end of an epoch, and save it: one leg of a run that changes strategy."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from project.data.datamodule import ImageDataModule
from project.model.classifier import Classifier
from project.model.networks import ConvNet


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.5)


def one_leg(cache_dir: str, checkpoint: str, strategy: Any, devices: int, epochs: int) -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=epochs,
        limit_train_batches=5,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier(
        ConvNet((4, 4, 8, 8, 8, 8), 16, activation="none"), sgd, None, None
    )  # as IN_FLOAT32 in test_train.py
    there = checkpoint if Path(checkpoint).exists() else None
    trainer.fit(module, ImageDataModule("synthetic", cache_dir=cache_dir), ckpt_path=there, weights_only=True)
    trainer.save_checkpoint(checkpoint)


if __name__ == "__main__":
    cache_dir, checkpoint, strategy, devices, epochs = sys.argv[1:]
    one_leg(cache_dir, checkpoint, strategy, int(devices), int(epochs))

"""A user's own program: their Trainer, our module and data, nothing of the command line."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from lightning.pytorch import Trainer, seed_everything

from project.data.datamodule import ImageDataModule
from project.model.classifier import Classifier
from project.model.networks import ConvNet

if __name__ == "__main__":
    devices, cache_dir, output = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    seed_everything(0, verbose=False)
    module = Classifier(ConvNet())
    data = ImageDataModule("synthetic", cache_dir=cache_dir)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=devices,
        max_epochs=10,
        max_steps=30,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data)
    figures = trainer.test(module, data, verbose=False)[0]
    if trainer.is_global_zero:
        torch.save({"state_dict": module.state_dict(), "figures": figures}, output)

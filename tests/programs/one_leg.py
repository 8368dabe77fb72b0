"""Train from a checkpoint, if it is there, to the end of an epoch, and save it: one leg of a run that changes strategy."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typing import Any

from lightning.pytorch import Trainer, seed_everything

from project.data.datamodule import ImageDataModule
from project.model.classifier import Classifier
from project.model.networks import ConvNet


def one_leg(cache_dir: str, checkpoint: str, strategy: Any, devices: int, epochs: int) -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        precision="64-true",
        max_epochs=epochs,
        limit_train_batches=5,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier(ConvNet((4, 4, 8, 8, 8, 8), 16), lr_scheduler=None)
    module.double()  # Lightning 2.6.6 does that after it has loaded a checkpoint, whose float64 it thus rounds to float32
    data = ImageDataModule("synthetic", eval_batch_size=20, cache_dir=cache_dir)
    there = checkpoint if Path(checkpoint).exists() else None
    trainer.fit(module, data, ckpt_path=there, weights_only=True)
    trainer.save_checkpoint(checkpoint)


if __name__ == "__main__":
    cache_dir, checkpoint, strategy, devices, epochs = sys.argv[1:]
    one_leg(cache_dir, checkpoint, strategy, int(devices), int(epochs))

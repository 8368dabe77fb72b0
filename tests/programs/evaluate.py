"""Evaluate one checkpoint on several folders, on a number of processes; rank 0 prints the figures as JSON."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning.pytorch import Trainer

from project.data.datamodule import ImageDataModule
from project.model.classifier import Classifier
from project.model.networks import ConvNet

if __name__ == "__main__":
    devices, checkpoint, cache_dir, *roots = sys.argv[1:]
    figures = []
    for root in roots:
        data = ImageDataModule("folder", root, 6, eval_batch_size=16, cache_dir=cache_dir)
        model = Classifier(ConvNet((4, 4, 8, 8, 8, 8), 16, num_classes=data.num_classes), num_classes=data.num_classes)
        trainer = Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=int(devices),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        figures += trainer.test(model, data, ckpt_path=checkpoint, weights_only=True, verbose=False)
    if trainer.is_global_zero:
        print(json.dumps(figures))

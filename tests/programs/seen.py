"""A callback that writes down which images each rank sees, as they come out of the augmentation."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from project.data.batches import BatchIndex, ImageBatches


class Seen(Callback):
    """Write `<folder>/<rank>.json`: for every batch the epoch, the positions, and the sum of each image's pixels.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        NotedImages.file = self.folder / f"{trainer.global_rank}.jsonl"
        trainer.train_dataloader.dataset.__class__ = NotedImages
        data = trainer.datamodule
        validation = {"train": data.train_positions.tolist(), "val": data.val_positions.tolist()}
        (self.folder / f"{trainer.global_rank}.split.json").write_text(json.dumps(validation))


class NotedImages(ImageBatches):
    """Images that are noted as they are taken."""

    file: Path

    def __getitem__(self, index: BatchIndex) -> Any:
        images, labels = super().__getitem__(index)
        weights = images.long().flatten(1).cumsum(1).sum(1)  # the place of each pixel counts
        with open(self.file, "a") as file:
            file.write(json.dumps([index.epoch, index.positions.tolist(), weights.tolist()]) + "\n")
        return images, labels

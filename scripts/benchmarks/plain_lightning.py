"""The Lightning script that most people write: defaults, and `self.log(..., prog_bar=True)` in every step.

Network, images and optimizer are those of scripts/manual/cpu.py, so that only the loop around them differs.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the `project` of this clone

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from project.data.batches import GlobalBatchSampler
from project.data.datamodule import ImageDataModule
from project.model.networks import ConvNet


class Plain(LightningModule):
    def __init__(self, network, data):
        super().__init__()
        self.network, self.data = network, data

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.network(self.data.normalize_images(images)), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_start(self):
        self.start = time.perf_counter()

    def on_train_epoch_end(self):
        steps = self.trainer.num_training_batches
        print(f"\nepoch {self.current_epoch} {1000 * (time.perf_counter() - self.start) / steps:.4f} ms/step", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, nargs=6, default=[16, 16, 32, 32, 64, 64])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--logs", default="logs")
    flags = parser.parse_args()
    data = ImageDataModule("synthetic", batch_size=flags.batch_size, shift=0, flip=False, normalize=False)
    data.prepare_data()
    data.setup()
    sampler = GlobalBatchSampler(data.train_batches, data.train_positions, flags.batch_size)
    loader = DataLoader(data.train_batches, None, sampler=sampler)
    torch.manual_seed(0)
    network = ConvNet(flags.channels, flags.hidden, activation="none").to(memory_format=torch.channels_last)
    Trainer(max_epochs=flags.epochs, accelerator="cpu", devices=1, default_root_dir=flags.logs).fit(
        Plain(network, data), loader
    )

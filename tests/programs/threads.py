"""A callback that prints each process's number of threads."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class PrintThreads(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"rank {trainer.global_rank} has {torch.get_num_threads()} threads", flush=True)

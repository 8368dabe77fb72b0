"""Train an image classifier, test its best checkpoint, and sum up.

    python scripts/train.py                                            one process, on the GPU if there is one
    python scripts/train.py --accelerator gpu --devices 1              one GPU
    python scripts/train.py --strategy ddp --devices 2                 two processes, on two GPUs or on the CPU
    python scripts/train.py --config configs/cifar10.yaml              the default network's recipe, on CIFAR-10

Flags change where it runs, never what it computes. `--help` lists them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the `project` beside this script, whatever is installed

from project.run.exit import exit_codes


def main() -> None:
    """Parse, fit, test, summarise."""
    from project.data.datamodule import ImageDataModule
    from project.model.classifier import Classifier
    from project.run.cli import TrainCLI

    cli = TrainCLI(Classifier, ImageDataModule)
    cli.trainer.fit(cli.model, cli.datamodule)
    cli.trainer.test(cli.model, cli.datamodule, ckpt_path=cli.best_checkpoint, weights_only=True, verbose=False)
    cli.summarise()


if __name__ == "__main__":
    with exit_codes():
        main()

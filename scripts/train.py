"""Train an image classifier, test its best checkpoint, and sum up.

    python scripts/train.py                                            all GPUs of this machine, or one process on the CPU
    python scripts/train.py --accelerator gpu --devices 1              one GPU
    python scripts/train.py --strategy ddp --devices 2                 two processes, on two GPUs or on the CPU
    python scripts/train.py --strategy dp                              one process on all GPUs
    python scripts/train.py --config configs/cifar10.yaml              the default network's recipe, on CIFAR-10
    python scripts/train.py --strategy ddp --devices 2 --resume        go on where the newest run stopped
    python scripts/train.py --strategy ddp --devices 2 --explain       say what that would do, and do nothing

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

    # step 2: Lightning takes the GPUs that --devices chooses, counted within CUDA_VISIBLE_DEVICES
    cli = TrainCLI(Classifier, ImageDataModule)
    if cli.config.explain:
        return cli.explain()
    # In here Lightning does, where the flags ask for it:
    # step 4: join them in a process group
    # step 5: give each its own GPU
    # step 9: move the network there
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.resume_from, weights_only=True)
    # step 15: load the best checkpoint, onto whatever device this is; plain values alone
    cli.trainer.test(cli.model, cli.datamodule, ckpt_path=cli.best_checkpoint, weights_only=True, verbose=False)
    return cli.summarise()


if __name__ == "__main__":
    with exit_codes():
        main()

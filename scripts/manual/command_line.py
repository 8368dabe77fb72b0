"""What cpu.py, gpu.py, dp.py and ddp.py share that is no step of training: their flags, and how they refuse."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn


def make_parser(description: str, weights: str) -> argparse.ArgumentParser:
    """Return a parser with the common flags."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", default="auto", choices=["auto", "cifar10", "folder", "synthetic"], help="where images come from")
    add("--root", default="data", help="folder of the images")
    add("--epochs", type=int, default=10)
    add("--batch_size", type=int, default=64, help="images per training step, over all devices")
    add("--channels", type=int, nargs=6, default=[16, 16, 32, 32, 64, 64], help="output channels of the six convolutions")
    add("--hidden", type=int, default=128, help="width of the first linear layer")
    add("--report_every", type=int, default=10, help="steps from one printed line to the next")
    add("--weights", type=Path, default=Path(weights), help="folder for the weights of every epoch")
    return parser


def stop(message: str) -> NoReturn:
    """Print one line and end with exit code 2, the user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)

"""What the hand-written programs share that is no step of training: their flags, and how they refuse."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show the program's docstring as it is, and every default."""


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def make_parser(description: str, weights: str = "") -> argparse.ArgumentParser:
    """Return a parser; with the flags of training, where there is a folder for weights."""
    parser = argparse.ArgumentParser(description=description, formatter_class=Help, allow_abbrev=False)
    if weights:
        add, sources = parser.add_argument, ["auto", "cifar10", "folder", "synthetic"]
        add("--source", default="auto", choices=sources, help="where images come from")
        add("--root", default="data", help="folder of the images")
        add("--epochs", type=positive, default=10, help="how often every training image is seen")
        add("--batch_size", type=positive, default=64, help="images per training step, over all devices")
        add("--channels", type=positive, nargs=6, default=[16, 16, 32, 32, 64, 64], help="of the six convolutions")
        add("--hidden", type=positive, default=128, help="width of the first linear layer")
        add("--report_every", type=positive, default=10, help="steps from one printed line to the next")
        add("--weights", type=Path, default=Path(weights), help="folder for the weights of every epoch")
    return parser


def run(main: Callable[[], None]) -> None:
    """Run a program; a mistake that the template's data module finds is one line, and exit code 2."""
    from project.errors import UsageError  # the program has put its clone into the path

    try:
        main()
    except UsageError as error:
        stop(str(error).replace("--data.", "--"))


def stop(message: str) -> NoReturn:
    """Print one line, on rank 0 only, and end with exit code 2, the user's mistake."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    sys.exit(2)

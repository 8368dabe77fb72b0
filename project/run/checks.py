"""Checks of the hardware flags, before anything starts: each failure is one line with the flag, the value and the remedy."""

import difflib
import os
from collections.abc import Iterable

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.strategies import StrategyRegistry

from project.errors import UsageError


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that looks most like the word, or None if none does."""
    return next(iter(difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)), None)


def check_accelerator(accelerator: str) -> str:
    """Return the accelerator that a value of `--accelerator` means on this machine: "cpu", "cuda", "mps" or another.

    Raises:
        UsageError: It is unknown, or this machine does not have it.
    """
    known = {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
    if accelerator not in known:
        hint = nearest(accelerator, known)
        raise UsageError(
            f"--accelerator {accelerator} is not known; "
            + (f"did you mean {hint}?" if hint else f"one of {', '.join(sorted(known))}")
        )
    if accelerator == "auto":
        return "cuda" if CUDAAccelerator.is_available() else "mps" if MPSAccelerator.is_available() else "cpu"
    if accelerator == "gpu":
        if CUDAAccelerator.is_available():
            return "cuda"
        if MPSAccelerator.is_available():
            return "mps"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(
            "--accelerator gpu: no GPU was found; looked for NVIDIA or AMD (torch.cuda.is_available() is False, PyTorch"
            f" built for CUDA {torch.version.cuda}, CUDA_VISIBLE_DEVICES {'not set' if visible is None else repr(visible)})"
            " and for Apple's (torch.backends.mps.is_available() is False); here use --accelerator cpu"
        )
    if not AcceleratorRegistry.get(accelerator).is_available():
        raise UsageError(f"--accelerator {accelerator}: this machine has none; use --accelerator auto or cpu")
    return accelerator


def count_devices(accelerator: str, devices: int | str | list[int]) -> int:
    """Return how many devices of this machine a value of `--devices` means.

    Args:
        accelerator: As `check_accelerator` returns it.
        devices: A number; on GPUs also "all" as -1, or the GPUs' numbers as "0,2" or a list; "auto" for what Lightning
            takes by itself: one process on the CPU, all GPUs.

    Raises:
        UsageError: It means no device here.
    """
    value = ",".join(map(str, devices)) if isinstance(devices, list) else str(devices).strip()
    if accelerator == "cpu":
        if value == "auto":
            return 1
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(
                f"--devices {value}: on the CPU this is the number of processes, 1 or more; use --devices 1, or"
                f" --devices 2 --strategy ddp"
            )
        return int(value)
    count: int = AcceleratorRegistry.get(accelerator).auto_device_count()
    if value in ("auto", "-1"):
        return count
    try:
        numbers = [int(number) for number in value.split(",") if number.strip()]
    except ValueError:
        numbers = []
    if "," not in value and not isinstance(devices, list):  # one number is how many, not which
        numbers = list(range(numbers[0])) if numbers and numbers[0] > 0 else []
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise UsageError(f"--devices {value}: give a number such as 2, GPUs such as 0,2, or -1 for all {count}")
    if max(numbers) >= count:
        raise UsageError(
            f"--devices {value}: this machine has {count} ({accelerator}); "
            f"use at most --devices {count}, or --accelerator cpu"
        )
    return len(numbers)


def check_strategy(strategy: str) -> None:
    """Refuse a strategy that Lightning does not know.

    Raises:
        UsageError: With the nearest name it does know.
    """
    known = {"auto", *StrategyRegistry.available_strategies()}
    if strategy not in known:
        hint = nearest(strategy, known) or "ddp"
        raise UsageError(f"--strategy {strategy} is not known; did you mean --strategy {hint}?")

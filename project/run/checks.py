"""Checks of the hardware flags, before anything starts: each failure is one line with the flag, the value and the remedy."""

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.strategies import StrategyRegistry

from project.errors import UsageError


@dataclass(frozen=True)
class Hardware:
    """What the hardware flags come to.

    Attributes:
        accelerator: "cpu", "cuda", "mps" or another of Lightning's; "gpu" where this machine has none of any kind.
        devices: The numbers of the GPUs of one machine, or of its processes on the CPU.
        strategy: As `--strategy` names it, "auto" decided: "ddp" for several devices, otherwise "single_device".
        num_nodes: Machines.
        available: GPUs that this machine has.
        chosen: Whether `--devices` says how many, or leaves it to the machine.
        missing: Why it cannot run here, as an error message; empty where this machine has the GPUs.
    """

    accelerator: str
    devices: list[int]
    strategy: str
    num_nodes: int
    available: int
    chosen: bool
    missing: str

    @property
    def on_gpu(self) -> bool:
        """Whether it is not the CPU."""
        return self.accelerator != "cpu"

    @property
    def family(self) -> str:
        """The strategy without its variants: "ddp" for ddp_spawn and so on."""
        return "ddp" if self.strategy.startswith("ddp") else self.strategy

    @property
    def num_replicas(self) -> int:
        """Copies of the network, over all machines; each computes one part of the global batch."""
        return len(self.devices) * self.num_nodes

    @property
    def world_size(self) -> int:
        """Processes, over all machines."""
        return 1 if self.strategy in ("dp", "single_device") else self.num_replicas

    @property
    def is_launched(self) -> bool:
        """Whether it takes several processes that each run the command; others start theirs from within."""
        from_within = ("spawn", "fork", "notebook", "xla")
        return self.world_size > 1 and not any(word in self.strategy for word in from_within)


def check_hardware(accelerator: str, devices: int | str | list[int], strategy: str, num_nodes: int) -> Hardware:
    """Return what the hardware flags come to.

    Args:
        accelerator: cpu, gpu, auto, or another name of Lightning's.
        devices: A number; on GPUs also "all" as -1, or the GPUs' numbers as "0,2" or a list; "auto" for what Lightning
            takes by itself: one process on the CPU, all GPUs.
        strategy: A name that Lightning's registry knows, or auto.
        num_nodes: Machines.

    Raises:
        UsageError: They make no sense, on any machine.
    """
    if num_nodes < 1:
        raise UsageError(f"--num_nodes {num_nodes} must be at least 1")
    _check_strategy(strategy)
    kind, missing = check_accelerator(accelerator)
    if kind == "cpu":
        count, numbers = 0, _count_processes(devices)
    else:
        count = 0 if missing else _kind(kind).auto_device_count()
        numbers = choose_devices(devices, count)
        if not missing and max(numbers) >= count:
            missing = (
                f"--devices {_text(devices)}: this machine has {count} ({kind}); "
                f"use at most --devices {count}, or --accelerator cpu"
            )
    if strategy == "dp":
        if num_nodes > 1:
            raise UsageError(f"--num_nodes {num_nodes}: --strategy dp is one process on one machine; use --strategy ddp")
        if kind not in ("cuda", "gpu"):
            numbers = numbers[:1]  # DataParallel splits over NVIDIA's and AMD's GPUs alone; the strategy warns
    if strategy == "auto":
        strategy = "ddp" if len(numbers) * num_nodes > 1 else "single_device"
    return Hardware(kind, numbers, strategy, num_nodes, count, _text(devices) not in ("auto", "-1"), missing)


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that looks most like the word, or None if none does."""
    return next(iter(difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)), None)


def check_accelerator(accelerator: str) -> tuple[str, str]:
    """Return the accelerator that a value of `--accelerator` means on this machine, and what the machine lacks."""
    known = {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
    if accelerator not in known:
        hint = nearest(accelerator, known)
        raise UsageError(
            f"--accelerator {accelerator} is not known; "
            + (f"did you mean {hint}?" if hint else f"one of {', '.join(sorted(known))}")
        )
    gpu = "cuda" if CUDAAccelerator.is_available() else "mps" if MPSAccelerator.is_available() else ""
    if accelerator == "auto":
        return gpu or "cpu", ""
    # step 3: torch.cuda.is_available(); without a GPU it stops here, before anything is made
    if accelerator == "gpu":
        return gpu or "gpu", "" if gpu else _no_gpu()
    if _kind(accelerator).is_available():
        return accelerator, ""
    return accelerator, f"--accelerator {accelerator}: this machine has none; use --accelerator auto or cpu"


def _kind(name: str) -> type[Accelerator]:
    kind: type[Accelerator] = AcceleratorRegistry[name]["accelerator"]  # to make a TPU's object takes its library
    return kind


def _no_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        "--accelerator gpu: no GPU was found; looked for NVIDIA or AMD (torch.cuda.is_available() is False, PyTorch built"
        f" for CUDA {torch.version.cuda}, CUDA_VISIBLE_DEVICES {'not set' if visible is None else repr(visible)}) and for"
        " Apple's (torch.backends.mps.is_available() is False); here use --accelerator cpu"
    )


def _text(devices: int | str | list[int]) -> str:
    return ",".join(map(str, devices)) if isinstance(devices, list) else str(devices).strip()


def _count_processes(devices: int | str | list[int]) -> list[int]:
    value = _text(devices)
    if value == "auto":
        return [0]
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(
            f"--devices {value}: on the CPU this is the number of processes, 1 or more; use --devices 1, or"
            f" --devices 2 --strategy ddp, or, to choose GPUs, --accelerator gpu"
        )
    return list(range(int(value)))


def choose_devices(devices: int | str | list[int], count: int) -> list[int]:
    """Return the numbers of the GPUs; of one GPU where `count` is 0 and the flag leaves it to the machine."""
    value = _text(devices)
    if value in ("auto", "-1"):
        return list(range(count or 1))
    try:
        numbers = [int(number) for number in value.split(",") if number.strip()]
    except ValueError:
        numbers = []
    if "," not in value and not isinstance(devices, list):  # one number is how many, not which
        numbers = list(range(numbers[0])) if numbers and numbers[0] > 0 else []
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        every = f"all {count}" if count else "all"
        raise UsageError(f"--devices {value}: give a number such as 2, GPUs such as 0,2, or -1 for {every}")
    return numbers


def _check_strategy(strategy: str) -> None:
    known = {"auto", *StrategyRegistry.available_strategies()}
    if strategy not in known:
        hints = sorted(difflib.get_close_matches(strategy, known, n=2) or ["ddp"], key=len, reverse=True)
        raise UsageError(f"--strategy {strategy} is not known; did you mean --strategy {' or '.join(hints)}?")

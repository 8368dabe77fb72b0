"""nn.DataParallel on a machine without GPUs: what it does through CUDA is replaced by the same on the CPU.

torch's own code does the rest: splitting nested inputs, replicating modules, joining nested outputs. As on GPUs, each
replica runs in a thread of its own, which begins with autocast's defaults and without inference mode.

Run as a program it runs a script so: `python -m tests.simulated_devices scripts/train.py --strategy dp --devices 3`. A
DataParallel that a script makes itself, with no GPUs, gets two devices.
"""

import importlib
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

from project.run import strategies

data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
scatter_gather = importlib.import_module("torch.nn.parallel.scatter_gather")
replicate = importlib.import_module("torch.nn.parallel.replicate")


class Scatter:
    @staticmethod
    def apply(devices: Sequence[int], sizes: None, dim: int, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(len(devices), dim)  # as CUDA's does


class Gather:
    @staticmethod
    def apply(device: int, dim: int, *tensors: Tensor) -> Tensor:
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors, dim)


def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
    """The first device's copies share their memory with the originals."""
    copies = [[tensor.view_as(tensor) if i == 0 else tensor.clone() for tensor in tensors] for i in range(len(devices))]
    return [[tensor.detach() for tensor in copy] for copy in copies] if detach else copies


def parallel_apply(replicas: Sequence[Any], inputs: Any, kwargs: Any, devices: Sequence[int]) -> list[Any]:
    grad = torch.is_grad_enabled()
    results: list[Any] = [None] * len(replicas)

    def work(i: int) -> None:
        torch.set_grad_enabled(grad)
        try:
            results[i] = replicas[i](*inputs[i], **kwargs[i])
        except Exception:
            results[i] = ExceptionWrapper(where=f"in replica {i}")  # as torch's own does

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, ExceptionWrapper):
            result.reraise()
    return results


def initialise(self: Any, module: torch.nn.Module, device_ids: Sequence[Any] = ()) -> None:
    torch.nn.Module.__init__(self)
    self.module = module
    self.device_ids = list(range(len(device_ids) or 2))  # cpu:0, cpu:1, ..., which are all the same memory
    self.output_device, self.src_device_obj, self.dim = 0, torch.device("cpu"), 0


def simulate(setattr: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put the CPU's versions in place; `Trainer(accelerator="cpu", devices=3, strategy="dp")` then splits in three."""
    setattr(scatter_gather, "Scatter", Scatter)
    setattr(scatter_gather, "Gather", Gather)
    setattr(replicate, "_broadcast_coalesced_reshape", broadcast)
    setattr(data_parallel, "parallel_apply", parallel_apply)
    setattr(torch.nn.DataParallel, "__init__", initialise)
    setattr(strategies.DataParallelStrategy, "splits", True)


if __name__ == "__main__":
    simulate()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")

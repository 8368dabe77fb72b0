"""How busy the devices are, and how full: what `nvidia-smi` or `top` beside a run would tell."""

import os
import time

import torch
from lightning.pytorch.strategies import Strategy

from project.run.strategies import DataParallelStrategy


def devices_of(strategy: Strategy) -> list[torch.device]:
    """Return the devices that this process computes on: its own, or with dp all of them.

    `parallel_devices` of ddp are those of all ranks, and to ask a GPU how full it is opens a context on it.
    """
    if isinstance(strategy, DataParallelStrategy):
        return strategy.parallel_devices or [strategy.root_device]
    return [strategy.root_device]


class DeviceUse:
    """Of the devices that this process computes on.

    Args:
        devices: GPUs, or the CPU.

    Attributes:
        kind: "gpu" or "cpu": what the figures are called after; of Apple's GPUs, which do not tell, they are the CPU's.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type == "cuda"]
        self.kind = "gpu" if self._gpus else "cpu"
        self._then = self._busy()

    def since_last(self) -> tuple[float, float]:
        """Return how busy they were since the last call, in percent, and how much memory is in use, in MiB.

        On the CPU 100 is one core, and the memory is this process's resident set. On GPUs it is the mean over them of
        their use in the last second, NaN without the package nvidia-ml-py, and the memory of the fullest that is in
        use, by whomever.
        """
        if self._gpus:
            full = [total - free for free, total in map(torch.cuda.mem_get_info, self._gpus)]
            return _percent(self._gpus), max(full) / 2**20
        then, self._then = self._then, self._busy()
        seconds = self._then[1] - then[1]
        return 100 * (self._then[0] - then[0]) / seconds if seconds else 0.0, resident_bytes() / 2**20

    @staticmethod
    def _busy() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()


def _percent(gpus: list[torch.device]) -> float:
    try:
        return sum(map(torch.cuda.utilization, gpus)) / len(gpus)
    except Exception:  # no nvidia-ml-py, or a driver that does not tell
        return float("nan")


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM, shared pages included; its peak where the system tells no more."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if os.uname().sysname == "Darwin" else peak * 1024

"""How busy and how full the devices are."""

import mmap
import time
from types import SimpleNamespace

import pytest
import torch

from project.run.strategies import DataParallelStrategy
from project.run.usage import DeviceUse, devices_of, resident_bytes

CPU = [torch.device("cpu")]


def test_a_busy_process_uses_what_it_got_of_a_core_and_a_sleeping_one_none() -> None:
    use, start = DeviceUse(CPU), time.perf_counter()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    percent, seconds = use.since_last()[0], time.perf_counter() - start  # less than one core where others are at work
    assert percent == pytest.approx(100 * 0.3 / seconds, rel=0.2)
    time.sleep(0.3)
    assert use.since_last()[0] < 20


def test_memory_is_what_is_resident() -> None:
    use = DeviceUse(CPU)
    before = resident_bytes()
    block = mmap.mmap(-1, 64 * 2**20)  # from the system: what malloc keeps of earlier tests is resident already
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    grown = resident_bytes() - before
    assert 60 * 2**20 < grown < 80 * 2**20
    assert abs(use.since_last()[1] * 2**20 - resident_bytes()) < 2**20
    block.close()


def test_a_rank_of_ddp_looks_at_its_own_gpu_alone_and_dp_at_all_of_its() -> None:
    """To ask a GPU how full it is opens a context on it: some hundred MiB, on every other rank's GPU."""
    gpus = [torch.device("cuda", number) for number in range(4)]
    ddp = SimpleNamespace(parallel_devices=gpus, root_device=gpus[2])
    assert devices_of(ddp) == [gpus[2]]  # type: ignore[arg-type]
    assert devices_of(DataParallelStrategy(gpus)) == gpus
    assert devices_of(DataParallelStrategy()) == [torch.device("cpu")]

"""Memory that tensors free is kept for the next ones."""

import os
import platform
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# glibc before 2.38 puts an aligned block into no hole of its own size: up to nine were taken anew until holes had met.
PROGRAM = """
import resource, sys
import torch
from project.run.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert not keep_freed_memory(2**30)
    assert keep_freed_memory(2**20)
for _ in range(30):
    torch.ones(2**25)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(2**25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_tensors_take_the_pages_of_those_before_them() -> None:
    faults = {}
    for how in ("kept", "returned"):
        command = [sys.executable, "-c", PROGRAM, how]
        result = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True
        )
        faults[how] = int(result.stdout)
    assert faults["returned"] > 5 * 2**27 / 2**21  # 128 MiB each; of pages of 2 MiB at the largest
    assert faults["kept"] < 0.25 * faults["returned"]


def test_what_the_environment_sets_is_left_as_it_is() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "2"}
    program = "from project.run.memory import keep_freed_memory; print(keep_freed_memory(2**20))"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False\n"  # whoever sets the allocator up has the last word

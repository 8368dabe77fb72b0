"""Run a program by a clock that stands still while the program is stopped: `clocked.py script.py ...`.

scripts/benchmark.py has programs take turns, and writes into the file that BENCHMARK_CLOCK names how many nanoseconds this
one has been stopped so far. Whatever the program measures by `time.perf_counter` is then its own time alone.
"""

import mmap
import os
import runpy
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path


def own_clock(file: Path) -> Callable[[], float]:
    """Return a `perf_counter` without the time in which this process was stopped."""
    with file.open("rb") as opened:
        stopped = mmap.mmap(opened.fileno(), 8, access=mmap.ACCESS_READ)
    clock = time.perf_counter

    def perf_counter() -> float:
        while True:
            before, now = stopped[:], clock()
            if stopped[:] == before:  # else it was stopped in between
                return now - 1e-9 * struct.unpack("q", before)[0]  # type: ignore[no-any-return]

    return perf_counter


if __name__ == "__main__":
    time.perf_counter = own_clock(Path(os.environ["BENCHMARK_CLOCK"]))
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")

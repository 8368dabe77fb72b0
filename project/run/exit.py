"""Exit codes: 0 done, 2 the user's mistake in one line, 1 a failure with its traceback."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from project.errors import UsageError

_cleanups: list[Callable[[], None]] = []


def before_exit_2(cleanup: Callable[[], None]) -> None:
    """Have rank 0 call a function before it ends with exit code 2."""
    _cleanups.append(cleanup)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn a `UsageError` into one line on stderr and exit code 2; let everything else pass."""
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0)
    try:
        yield
    except UsageError as error:
        if rank and _rank_zero_ended(10):
            sys.exit(2)  # it has met the same, and said so
        print(f"error on rank {rank}: {error}" if rank else f"error: {error}", file=sys.stderr, flush=True)
        if rank:
            sys.exit(2)
        for cleanup in _cleanups:
            cleanup()
        sys.stdout.flush()
        os._exit(2)  # at once: Lightning's watcher of the processes just ended would take their end for a crash
    except Exception:
        if rank and _rank_zero_ended(2):
            sys.exit(1)  # it has said what was wrong; this process only misses it
        raise


def _rank_zero_ended(seconds: float) -> bool:
    """Wait for the process that started this one, rank 0 under Lightning's launcher, to end."""
    parent, deadline = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.getppid() != parent:
            return True
        time.sleep(0.1)
    return False

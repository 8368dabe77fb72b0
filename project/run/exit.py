"""Exit codes: 0 done, 2 the user's mistake in one line, 1 a failure with its traceback."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from project.errors import UsageError


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn a `UsageError` into one line on stderr and exit code 2; let everything else pass."""
    try:
        yield
    except UsageError as error:
        rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0)
        if rank and _rank_zero_ended():
            sys.exit(2)  # it has met the same, and said so
        print(f"error on rank {rank}: {error}" if rank else f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _rank_zero_ended(seconds: float = 10.0) -> bool:
    """Wait for the process that started this one, rank 0 under Lightning's launcher, to end."""
    parent, deadline = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.getppid() != parent:
            return True
        time.sleep(0.1)
    return False

"""How a script ends: 0 done, 1 a failure, 2 the user's mistake, 130 and 143 stopped by a signal and saved."""

import errno
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import NoReturn

from project.errors import RunError, UsageError
from project.run.signals import Stopped, stop_signal

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOST = "error: the other ranks do not answer"  # how that line begins
LAUNCHED_BY_US = "PROJECT_LAUNCHER"  # in the environment of a rank that project.run.launch has started


QUIET_GLOO = (2, 14)  # the first torch seen whose gloo prints nothing; that of 2.10 does


def _take_stdout_from_libraries() -> None:
    """Let Python alone write to the standard output: gloo's "[Gloo] Rank 0 is connected ..." goes nowhere."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the process with the right code and words, whatever happens inside.

    A rank that was launched leaves an account in TORCHELASTIC_ERROR_FILE, as torchrun expects it, so that the launcher
    can say which rank failed first. Under our own launcher that is all it says; otherwise it prints it too.
    """
    stop_signal.install()
    is_rank = "LOCAL_RANK" in os.environ or "--explain" in sys.argv  # which is itself rank 0
    is_rank &= "NCCL_DEBUG" not in os.environ  # what that asks for is written there too
    if is_rank and tuple(map(int, version("torch").split(".")[:2])) < QUIET_GLOO:
        _take_stdout_from_libraries()
    if "LOCAL_RANK" in os.environ:  # python -m torch.distributed.launch says it a second time, as an argument
        sys.argv[:] = [arg for arg in sys.argv if not re.fullmatch(r"--local[-_]rank=\d+", arg)]
    if "--quiet" in sys.argv or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries, which would fill a log with control characters
    try:
        yield
        stop_signal.done()
    except Stopped as stopped:
        _end(stopped.code)
    except (UsageError, RunError) as error:
        _fail(2 if isinstance(error, UsageError) else 1, f"error: {error}")
    except SystemExit as error:
        if error.code or not _launched() or {"-h", "--help", "--print_config"} & set(sys.argv):
            raise
        _fail(1, f"it left before the end, with exit code 0\n{traceback.format_exc()}")
    except OSError as error:
        _fail(1, f"error: {no_space(error)}" if error.errno in NO_SPACE and error.filename else traceback.format_exc())
    except Exception as error:
        _fail(1, lost_ranks(error) or traceback.format_exc())


def no_space(error: OSError) -> str:
    """Say in one line that a file, which the error names, could not be written for want of space."""
    name = os.path.abspath(error.filename)
    folder = name
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free / 2**20
    return f"{name} could not be written: {error.strerror}; {free:,.1f} MiB are free in {folder}"


def lost_ranks(error: Exception) -> str:
    """Say in one line that other ranks did not come, have gone or are silent, where an error comes of that; else nothing."""
    distributed = sys.modules.get("torch.distributed")
    text = " ".join(str(error).split())
    if distributed is None or not isinstance(error, RuntimeError):
        return ""
    if not isinstance(error, distributed.DistError) and not re.search(
        r"gloo[/.]|\bgloo\b.*(?:closed|timed out)", text, re.I
    ):
        return ""
    if not re.search(
        r"timed? ?out|closed|reset|refused|unreachable|no route|abort|remote process|failed to connect", text, re.I
    ):
        return ""
    met = f"{os.environ.get('MASTER_ADDR', '?')} port {os.environ.get('MASTER_PORT', '?')}"
    reason = re.sub(r"^\[[^\]]*\] ?", "", text)[:160]
    return (
        f"{LOST} ({reason}), having waited up to --timeout; look whether the machine of rank 0, {met}, and the others are up"
        " and reach each other, and what their own output says; --resume goes on from the last checkpoint"
    )


def _launched() -> bool:
    return "TORCHELASTIC_ERROR_FILE" in os.environ


def _fail(code: int, words: str) -> NoReturn:
    """Tell the launcher, where there is one, and the user; then end."""
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0)
    if _launched():
        message = {"message": words, "extraInfo": {"py_callstack": words, "timestamp": str(int(time.time()))}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message}, file)
    if LAUNCHED_BY_US not in os.environ:
        if rank and words.startswith("error"):
            time.sleep(2)  # rank 0 has met the same, most likely, and its end will be this process's too
        where = f"on rank {rank}: " if rank else ""
        print(words.replace("error: ", f"error {where}", 1) if rank else words, file=sys.stderr)
    _end(code)


def _end(code: int) -> NoReturn:
    """End at once: what waits for other ranks, which may be gone, must not keep this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""A process for each device: the launcher that `--strategy ddp` starts them with, as torchrun would.

Every rank runs the same command, with torchrun's environment. The launcher computes nothing. It passes signals on, and
when a rank fails it ends the others and prints what the first one had to say, last of all.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, TCPStore

from project.errors import UsageError
from project.run.exit import LAUNCHED_BY_US, LOST
from project.run.signals import NAMES, SECONDS_TO_SAVE, stop_signal

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)  # exit codes
SECONDS_TO_FOLLOW = 5  # that the other ranks have to end by themselves when one has failed


@dataclass
class Rank:
    """One process.

    Attributes:
        number: Its rank.
        process: The process.
        account: The file in which it says what it failed of.
        code: Its exit code, once it has ended; negative for the signal that ended it.
        ended: When that was seen.
        at_fault: Whether it ended by itself, not because the launcher ended it.
    """

    number: int
    process: subprocess.Popen[bytes]
    account: Path
    code: int | None = None
    ended: float = 0.0
    at_fault: bool = True

    @property
    def says(self) -> str:
        """Its account; empty where it has left none."""
        return json.loads(self.account.read_text())["message"]["message"] if self.account.exists() else ""

    @property
    def account_written(self) -> float:
        """When it wrote its account; never, where it has not."""
        return self.account.stat().st_mtime if self.account.exists() else float("inf")


def launch(num_processes: int, num_nodes: int, more: list[str], seconds: float = 1800.0) -> int:
    """Run this very command once for each device of this machine, and return the exit code of all.

    Args:
        num_processes: Ranks of this machine.
        num_nodes: Machines; for more than one MASTER_ADDR, MASTER_PORT and NODE_RANK say who meets where.
        more: Flags to add to the command.
        seconds: To wait for the first machine.

    Raises:
        UsageError: The port that MASTER_PORT names is taken.
        DistNetworkError: The first machine did not come.
    """
    node_rank = int(os.environ.get("NODE_RANK", "0"))
    store = _host_store(num_nodes, node_rank, seconds)
    heard: list[int] = []
    for signum in NAMES:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda number, frame: heard.append(number))
    stop_signal.uninstall()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[Rank] = []
        machines = Machines(store, node_rank) if num_nodes > 1 else None
        try:
            # step 1: start a process for each device, all running this script
            for local_rank in range(num_processes):
                number = node_rank * num_processes + local_rank
                account = Path(folder, f"{number}.json")
                environment = os.environ | {
                    "RANK": str(number),
                    "LOCAL_RANK": str(local_rank),
                    "GROUP_RANK": str(node_rank),
                    "WORLD_SIZE": str(num_processes * num_nodes),
                    "LOCAL_WORLD_SIZE": str(num_processes),
                    "MASTER_ADDR": store.host,
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_RUN_ID": f"{os.getpid()}",
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "TORCHELASTIC_MAX_RESTARTS": "0",
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHELASTIC_ERROR_FILE": str(account),
                    LAUNCHED_BY_US: "1",
                }
                command = [sys.executable, *sys.orig_argv[1:], *more]
                ranks.append(Rank(number, subprocess.Popen(command, env=environment), account))
            code = _watch(ranks, store, heard, machines)
        finally:
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.kill()
                    rank.process.wait()
    if machines is not None:
        machines.leave(code)
    return code


def _host_store(num_nodes: int, node_rank: int, seconds: float) -> TCPStore:
    """Open the store by which the ranks find each other, on a free port unless MASTER_PORT names one."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "0")
    if not port.isdecimal() or int(port) >= 2**16:
        raise UsageError(f"MASTER_PORT {port} must be a whole number from 0 to {2**16 - 1}; unset it for a free port")
    if num_nodes > 1 and port == "0":
        raise UsageError(f"--num_nodes {num_nodes}: set MASTER_ADDR, MASTER_PORT and NODE_RANK, or launch with torchrun")
    try:
        first, wait = node_rank == 0, timedelta(seconds=seconds)
        return TCPStore(address, int(port), is_master=first, timeout=wait, wait_for_workers=False)
    except DistNetworkError as error:
        if node_rank > 0:
            raise
        why = "is in use" if "EADDRINUSE" in str(error) else f"cannot be used ({' '.join(str(error).split())[:200]})"
        raise UsageError(
            f"MASTER_PORT {port} on {address} {why}; unset MASTER_PORT for a free port, or name another"
        ) from error


class Machines:
    """What the launchers of several machines tell each other: that one has failed, so that no other waits for it.

    A thread does it, with a connection of its own: where the first machine is silent, it waits, and the launcher does not.

    Args:
        store: That of the first machine.
        own: Number of this machine.
    """

    KEY, SECONDS = "failed", 0.3  # to hear of it

    def __init__(self, store: TCPStore, own: int) -> None:
        self.own = own
        self.heard: tuple[int, str] = (0, "")  # the exit code of one that has failed, and its words; 0 where none has
        self._tell = ""
        self._told = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, args=(store.host, store.port), daemon=True, name="machines")
        self._thread.start()

    def _talk(self, host: str, port: int) -> None:
        with contextlib.suppress(RuntimeError):  # the first machine has finished and left
            store = TCPStore(host, port, is_master=False)
            while not self._over.is_set():
                if self._tell and not self._told.is_set():
                    store.compare_set(self.KEY, "", self._tell)  # the first that tells is heard
                    self._told.set()
                if store.check([self.KEY]):
                    number, code, words = store.get(self.KEY).decode().split(" ", 2)
                    if int(number) != self.own:
                        self.heard = (int(code), words)
                self._over.wait(self.SECONDS)

    def fails(self, rank: Rank) -> None:
        """Tell the others of a rank that has failed, unless it only misses others."""
        first, words = first_failure([rank])
        if not self._tell and not rank.says.startswith(LOST):
            begin, *rest = words.strip().splitlines()  # of a traceback whose it is, and what it comes to
            self._tell = f"{self.own} {2 if first.code == 2 else 1} {' '.join([begin, *rest[-1:]])}"

    def leave(self, code: int) -> None:
        """Wait until the others have heard: the store goes with the first machine's launcher. Then end the thread.

        Where it still waits for a silent machine, the process ends here: Python's own end would bring it down.
        """
        if self._tell and self._told.wait(2) and self.own == 0:
            time.sleep(3 * self.SECONDS)
        self._over.set()
        self._thread.join(2)
        if self._thread.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _watch(ranks: list[Rank], store: TCPStore, heard: list[int], machines: Machines | None = None) -> int:
    """Wait for all ranks; return the command's exit code."""
    stop, deadline, code, stopped, elsewhere = 0, float("inf"), 0, 0.0, ""
    while any(rank.code is None for rank in ranks):
        if machines is not None and not stop and not code:
            code, elsewhere = machines.heard
            if code:
                deadline = time.monotonic() + SECONDS_TO_FOLLOW
        if heard and not stop:
            stop, deadline, stopped = heard[0], time.monotonic() + SECONDS_TO_SAVE + 5, time.time()
            _set(store, "stop/signum", str(stop))  # ranks that are not connected yet see it when they are
            if stop == signal.SIGTERM:
                _signal_all(ranks, stop)
        if heard.count(signal.SIGINT) > 1:
            deadline = 0.0
        for rank in ranks:
            if rank.code is None and (ended := rank.process.poll()) is not None:
                rank.code, rank.ended = ended, time.time()
                if not stop and ended in STOPPED:  # it alone was told
                    stop, deadline, stopped = abs(ended) % 128, time.monotonic() + SECONDS_TO_SAVE + 5, time.time()
                    _signal_all(ranks, signal.SIGTERM)
                elif not stop and not code and not _finished(rank, store):
                    code, deadline = 2 if ended == 2 else 1, time.monotonic() + SECONDS_TO_FOLLOW
                    if machines is not None:
                        machines.fails(rank)
        if time.monotonic() > deadline:
            for rank in ranks:
                if rank.code is None:
                    rank.at_fault = False
                    rank.process.kill()
                    rank.code = rank.process.wait()
        time.sleep(0.02)
    failed = [rank for rank in ranks if rank.at_fault and rank.code not in STOPPED and not _finished(rank, store)]
    if stop:  # ranks that missed one which had already stopped have not failed
        own = [rank for rank in failed if rank.says.startswith("error: ") and not rank.says.startswith(LOST)]
        failed = [rank for rank in failed if rank in own or rank.account_written < stopped]
    if any(not rank.says.startswith(LOST) for rank in failed):  # who misses others is not at fault
        failed = [rank for rank in failed if not rank.says.startswith(LOST)]
    missing = all(rank.says.startswith(LOST) for rank in failed)  # others, on other machines
    if machines is not None and missing and (failed or elsewhere) and not stop:
        end = time.monotonic() + SECONDS_TO_FOLLOW
        while failed and not machines.heard[0] and time.monotonic() < end:
            time.sleep(0.1)
        if machines.heard[0]:
            print(machines.heard[1], file=sys.stderr, flush=True)
            return machines.heard[0]
    if failed:
        first, words = first_failure(failed)
        print(words, file=sys.stderr, flush=True)
        if machines is not None:
            machines.fails(first)
        return 2 if first.code == 2 else 1
    return 128 + stop if stop else 0


def _set(store: TCPStore, key: str, value: str) -> None:
    """Write into the store, and go on after a second where its machine is silent."""

    def write() -> None:
        with contextlib.suppress(RuntimeError):
            store.set(key, value)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(1)


def _finished(rank: Rank, store: TCPStore) -> bool:
    try:
        return rank.code == 0 and store.check([f"stop/done/{rank.number}"])
    except RuntimeError:  # the machine that kept the store has finished and left
        return True


def _signal_all(ranks: list[Rank], signum: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signum)


def first_failure(failed: list[Rank]) -> tuple[Rank, str]:
    """Return the rank that failed first, and what to print of it.

    One that was killed leaves no account, and its end is seen a little late; those that missed it write theirs after.
    """

    def when(rank: Rank) -> float:
        if rank.says:
            return rank.account_written
        return rank.ended - (2 if rank.code == -signal.SIGKILL else 0.2)

    rank = min(failed, key=when)
    if rank.says.startswith("error: "):
        alone = rank.number > 0 and sum(other.says == rank.says for other in failed) == 1
        return rank, rank.says.replace("error:", f"error on rank {rank.number}:", 1) if alone else rank.says
    if rank.says:
        return rank, f"rank {rank.number} failed first:\n{rank.says.rstrip()}"
    assert rank.code is not None
    if rank.code < 0:
        name = signal.Signals(-rank.code).name
        hint = " (out of memory?)" if -rank.code == signal.SIGKILL else ""
        return rank, f"error: rank {rank.number} was ended by {name}{hint}, and the run with it"
    return rank, f"error: rank {rank.number} left before the end, with exit code {rank.code}, and the run with it"

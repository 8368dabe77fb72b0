"""SIGTERM and SIGINT: all ranks stop between the same two steps, so that one checkpoint can be saved, and then leave.

Python runs a signal's handler between two of its own instructions: a rank that waits for others inside a collective
operation would not notice. So a thread of its own hears of signals, agrees with the other ranks, and keeps the time.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from project.errors import UsageError

SECONDS_TO_SAVE = 20  # from the signal until a rank leaves, saved or not
SECONDS_BEHIND_RANK_0 = 1  # it looks every 0.2 s whether its launcher is there
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT (Ctrl-C)"}


class Stopped(Exception):
    """A signal has ended the run, between two steps.

    Attributes:
        code: The exit code: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(NAMES[signal.Signals(signum)])
        self.code = 128 + signum


class StopSignal:
    """What a rank does on SIGTERM and SIGINT.

    While it trains, the rank passes boundaries: the start of every training batch, validation batch and epoch, and the
    end of the training. All ranks pass the same ones, but one may be ahead of another. On a signal each says how many it
    has passed and waits at the next; the stop is at the boundary after the highest number. Outside training there is
    nothing to save, and a rank leaves at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._write = -1  # the pipe on which it hears of signals
        self._training = False
        self._passed = 0  # boundaries
        self._stop_at: int | None = None
        self._signum = 0  # the first one, of this process or heard of
        self._interrupts = 0  # SIGINT to this process
        self._deadline = 0.0
        self._store: Any = None
        self._rank, self._world_size = 0, 1
        self.otherwise = "stopped; nothing was left to save"  # what to say outside training
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0

    # ---- called by the main thread

    @property
    def listens(self) -> bool:
        """Whether this process hears of signals by it."""
        return self._thread is not None

    def install(self) -> None:
        """Listen from now on, in the main thread of a script."""
        if self._thread is not None:
            return
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(read,), daemon=True, name="signals")
        self._thread.start()
        self.keep_handlers()

    def keep_handlers(self) -> None:
        """Take the handlers back that Lightning's trainer has put in their place; its own call collectives."""
        if self._thread is not None:
            for signum in NAMES:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                    signal.signal(signum, _nothing)

    def uninstall(self) -> None:
        """Listen no longer. A thread that is inside the store's C++ while Python ends would bring the process down."""
        if self._thread is not None:
            signal.set_wakeup_fd(-1)
            os.write(self._write, b"\0")
            self._thread.join()
            os.close(self._write)
            self._thread = None

    def join(self, rank: int, world_size: int) -> None:
        """Connect with the other ranks, through the store by which their process group finds itself.

        Args:
            rank: Of this process.
            world_size: Number of processes.
        """
        if self._thread is None or world_size == 1 or self._store is not None:
            return
        from torch.distributed import PrefixStore, TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        self._rank, self._world_size = rank, world_size
        self._store = PrefixStore("stop", store)

    def begin_training(self) -> None:
        """There is something to save from here on."""
        self.keep_handlers()
        with self._changed:
            self._training = True

    def passes(self) -> bool:
        """Pass a boundary; return False where the run must stop instead."""
        if not self._signum:  # nearly always; a signal that comes now is seen at the next boundary
            with self._changed:
                if not self._signum:
                    self._passed += 1
                    return True
        with self._changed:
            self._changed.wait_for(lambda: self._stop_at is not None)  # the deadline bounds this
            assert self._stop_at is not None
            self._passed += 1
            return self._passed < self._stop_at

    def end_training(self) -> None:
        """All is saved."""
        with self._changed:
            self._training = False
            signum = self._signum
        if signum:
            raise Stopped(signum)

    def stopped(self) -> Stopped:
        """Return the exception to raise where `passes` has returned False."""
        return Stopped(self._signum)

    def done(self) -> None:
        """Tell the launcher that this rank leaves because it has finished, and listen no longer."""
        self.uninstall()
        for signum, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(signum) is _nothing:
                signal.signal(signum, handler)
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"done/{self._rank}", "1")

    def agree_on(self, name: str, find: Callable[[], str], seconds: float = 300.0) -> str:
        """Have rank 0 find something, and tell the others, where they can hear of each other already.

        Args:
            name: Of the question.
            find: Called on rank 0.
            seconds: To wait for it: it may have to start yet, and wait for a machine.

        Raises:
            UsageError: It did not answer.
        """
        store, end = self._store, time.monotonic() + seconds
        if store is None:
            return find()
        if self._rank == 0:
            store.set(name, f"={find()}")
        while not store.check([name]):  # to wait inside the store would keep the thread from it
            if time.monotonic() > end:
                raise UsageError(f"rank 0 has not answered within --timeout, {seconds:g} s; look at its output")
            time.sleep(0.05)
        answer: bytes = store.get(name)
        return answer.decode()[1:]

    # ---- the thread

    def _listen(self, read: int) -> None:
        while True:
            if select.select([read], [], [], 0.2)[0]:
                for signum in os.read(read, 64):
                    if signum == 0:
                        return os.close(read)
                    if signum in NAMES:
                        self._interrupts += signum == signal.SIGINT
                        self._request(signum)
            if self._launcher and os.getppid() != self._launcher:
                if self._rank:
                    time.sleep(SECONDS_BEHIND_RANK_0)  # its leaving breaks rank 0's collective, which ends that wordless
                self._leave(1, "the process that started this rank is gone")
            if self._interrupts > 1:
                self._leave(130, "stopped at once, by a second Ctrl-C")
            if self._signum and time.monotonic() > self._deadline:
                self._leave(128 + self._signum, f"not done within {SECONDS_TO_SAVE} s; the checkpoints on disk are whole")
            if self._store is not None:
                try:
                    self._hear()
                except RuntimeError:  # whoever kept the store has left
                    if self._signum:
                        self._leave(128 + self._signum)
                    self._store = None

    def _request(self, signum: int) -> None:
        """Stop at the next boundary that all ranks can stop at."""
        with self._changed:
            if self._signum:
                return
            self._deadline = time.monotonic() + SECONDS_TO_SAVE
            self._signum = signum
            passed = str(self._passed) if self._training else "nothing to save"
            if self._store is None:
                self._stop_at = self._passed + 1
                self._changed.notify_all()
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set("signum", "", str(int(signum)))
                self._store.set(f"passed/{self._rank}", passed)
        if passed == "nothing to save":
            self._leave(128 + signum, self.otherwise)

    def _hear(self) -> None:
        """Look whether another rank has heard of a signal, and where all can stop."""
        if not self._signum and self._store.check(["signum"]):
            self._request(int(self._store.get("signum")))
        keys = [f"passed/{rank}" for rank in range(self._world_size)]
        if not self._signum or self._stop_at is not None or not self._store.check(keys):
            return
        answers = [self._store.get(key).decode() for key in keys]
        if "nothing to save" in answers:
            self._leave(128 + self._signum)
        with self._changed:
            self._stop_at = max(int(answer) for answer in answers) + 1
            self._changed.notify_all()

    def _leave(self, code: int, why: str = "") -> None:
        """End the process at once, whatever its main thread waits for."""
        if why and self._rank == 0:
            print(f"{NAMES.get(code - 128, 'error')}: {why}", file=sys.stderr)  # type: ignore[call-overload]
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _nothing(signum: int, frame: Any) -> None:
    """Let the thread do it: it reads the signal's number from the wakeup descriptor."""


def _forget() -> None:
    """In a forked process, which shares the descriptor: write nothing to it, and be ended by signals again."""
    with contextlib.suppress(ValueError):  # forked from another thread than the main one
        if signal.set_wakeup_fd(-1) == -1:
            return  # no script of ours
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop_signal.__init__()  # type: ignore[misc] # in place: others hold a reference


stop_signal = StopSignal()  # of this process
os.register_at_fork(after_in_child=_forget)  # the workers of data loaders

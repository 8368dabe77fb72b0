"""How ranks agree where to stop, and which failure counts as the first: without processes, by their rules."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import PrefixStore, TCPStore

from project.run.launch import Rank, first_failure
from project.run.signals import StopSignal


def failed(tmp_path: Path, number: int, code: int, ended: float, says: str = "", written: float = 0.0) -> Rank:
    account = tmp_path / f"{number}.json"
    if says:
        account.write_text(json.dumps({"message": {"message": says}}))
        os.utime(account, (written, written))
    return Rank(number, SimpleNamespace(), account, code, ended)  # type: ignore[arg-type]


LOST = 'Traceback ...\nRuntimeError: "Connection" closed by peer'
CAUSE = "Traceback ...\nValueError: the real cause"


def test_who_wrote_first_failed_first(tmp_path: Path) -> None:
    ranks = [failed(tmp_path, 0, 1, 101.5, LOST, 101.0), failed(tmp_path, 1, 1, 100.5, CAUSE, 100.0)]
    assert first_failure(ranks) == (ranks[1], f"rank 1 failed first:\n{CAUSE}")


def test_who_was_killed_comes_before_those_who_missed_it(tmp_path: Path) -> None:
    ranks = [failed(tmp_path, 0, 1, 101.0, LOST, 100.1), failed(tmp_path, 1, -signal.SIGKILL, 100.3)]
    rank, words = first_failure(ranks)
    assert rank is ranks[1]
    assert words == "error: rank 1 was ended by SIGKILL (out of memory?), and the run with it"


def test_who_aborts_later_for_want_of_the_first_does_not(tmp_path: Path) -> None:
    ranks = [failed(tmp_path, 0, 1, 100.4, CAUSE, 100.0), failed(tmp_path, 1, -signal.SIGABRT, 101.4)]
    assert first_failure(ranks)[0] is ranks[0]


def test_a_mistake_that_all_ranks_meet_names_none(tmp_path: Path) -> None:
    words = 'error: --data.root "Bilder für alle" is not there'
    ranks = [failed(tmp_path, 0, 2, 101.0, words, 100.1), failed(tmp_path, 1, 2, 101.0, words, 100.0)]
    assert first_failure(ranks)[1] == words
    assert first_failure(ranks[1:])[1] == words.replace("error:", "error on rank 1:")


class Walker:
    """A rank that passes boundaries until it must stop; it and the others may be one apart, as in ddp."""

    def __init__(self, store: TCPStore, rank: int, ranks: int) -> None:
        self.stop = StopSignal()
        self.stop._store, self.stop._rank, self.stop._world_size = PrefixStore("stop", store), rank, ranks
        self.stop._training = True
        self.passed = 0
        self.thread = threading.Thread(target=self.walk, daemon=True)

    def walk(self) -> None:
        while self.stop.passes():
            self.passed += 1
            time.sleep(0.0005 * (1 + self.stop._rank))


@pytest.mark.parametrize("told", [[0], [1], [2], [0, 1, 2]])
def test_all_ranks_stop_at_the_same_boundary(told: list[int]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    walkers = [Walker(store, rank, 3) for rank in range(3)]
    barrier = threading.Barrier(3)
    for walker in walkers:  # each boundary is followed by a step that all ranks take together
        passes = walker.stop.passes

        def and_step(passes=passes, walker=walker) -> bool:  # type: ignore[no-untyped-def]
            goes_on = passes()
            if goes_on:
                barrier.wait(10)
            return goes_on

        walker.stop.passes = and_step  # type: ignore[method-assign]
        walker.thread.start()
    time.sleep(0.1)
    for rank in told:
        walkers[rank].stop._request(signal.SIGTERM)
    deadline = time.monotonic() + 10
    while any(walker.thread.is_alive() for walker in walkers) and time.monotonic() < deadline:
        for walker in walkers:
            walker.stop._hear()
        time.sleep(0.01)
    assert not any(walker.thread.is_alive() for walker in walkers)
    assert len({walker.passed for walker in walkers}) == 1
    assert walkers[0].passed > 10
    assert {walker.stop.stopped().code for walker in walkers} == {143}

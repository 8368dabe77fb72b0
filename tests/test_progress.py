"""The bar of a run: there on a terminal, drawn now and then, and full at the end."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar

from project.run import callbacks
from project.run.callbacks import ProgressBar, RunRecord, clock, total_batches
from tests.conftest import NARROW, ROOT, clean_environment, train


def test_it_is_drawn_ten_times_a_second_and_at_the_end_of_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(RichProgressBar, "on_train_batch_end", lambda *arguments: drawn.append(arguments[-1]))
    bar, trainer = ProgressBar(), SimpleNamespace(should_stop=False, max_steps=-1, global_step=0)
    for number in range(12):
        monkeypatch.setattr(callbacks.time, "perf_counter", lambda number=number: 100 + 0.03 * number)
        trainer.is_last_batch = number == 11
        module: Any = None
        bar.on_train_batch_end(trainer, module, None, None, number)  # type: ignore[arg-type]
    assert drawn == [0, 4, 8, 11]


def on_a_terminal(*flags: object, **env: str) -> str:
    """What scripts/train.py writes on a terminal, escape codes included."""
    leader, terminal = pty.openpty()
    command = [sys.executable, ROOT / "scripts" / "train.py", "--accelerator", "cpu", "--devices", "1", *NARROW, *flags]
    environment = {**clean_environment(), "TERM": "xterm-256color", "COLUMNS": "80", **env}
    process = subprocess.Popen(list(map(str, command)), stdout=terminal, stderr=terminal, env=environment, cwd=ROOT)
    os.close(terminal)
    output = b""
    try:
        while True:
            try:
                some = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not some:
                break
            output += some
        assert process.wait(timeout=120) == 0, output[-2000:]
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return output.decode()


COLOUR = r"\x1b\[[0-9;]*(?:[34]8;|[39][0-7])[0-9;]*m"
SHORT = ["--data.source", "synthetic", "--max_epochs", "2", "--trainer.limit_train_batches", "7"]


@pytest.mark.parametrize("colourless", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_on_a_terminal_it_counts_to_the_last_batch_and_shows_the_figures(colourless: str, tmp_path: Path) -> None:
    if colourless:
        output = on_a_terminal(*SHORT, "--log_dir", tmp_path, NO_COLOR="1")
    else:
        output = on_a_terminal(*SHORT, "--log_dir", tmp_path)
    assert bool(re.search(COLOUR, output)) is not bool(colourless)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n")
    assert re.search(r"epoch 2/2 .*7/7 +loss: \d\.\d{3} accuracy: 0\.\d{4} images/s: [\d,]+ left: 0:\d\d", text)
    assert re.search(r"^epoch 2/2  train loss [^━]* images/s\s*$", text, re.MULTILINE)
    assert output.count("7/7") > 1  # it is drawn again and again


def test_into_a_file_it_is_one_plain_line_an_epoch(tmp_path: Path) -> None:
    flags = [*NARROW, "--data.source", "synthetic", "--max_epochs", "10", "--trainer.limit_train_batches", "3"]
    result = train(tmp_path, "--accelerator", "cpu", "--devices", "1", *flags)
    written = result.stdout + result.stderr
    lines = written.splitlines()
    assert len(lines) <= 40
    assert sum(line.startswith("epoch ") for line in lines) == 10
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", written)
    assert len(result.stdout.partition("data ")[2].splitlines()) + 1 <= 12  # the closing summary


def a_trainer(batches_done: int, **more: Any) -> Any:
    fit_loop = SimpleNamespace(total_batch_idx=batches_done - 1, batch_idx=(batches_done - 1) % 100)
    figures = {
        "max_epochs": 10,
        "max_steps": -1,
        "accumulate_grad_batches": 1,
        "num_training_batches": 100,
    }
    return SimpleNamespace(fit_loop=fit_loop, current_epoch=2, **(figures | more))


def test_in_a_long_epoch_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, module = RunRecord(), SimpleNamespace(last_point={"train/loss": 1.5, "train/accuracy": 0.25})
    seconds_a_batch = 3.0
    for done in range(0, 1000, 10):
        monkeypatch.setattr(callbacks.time, "perf_counter", lambda done=done: seconds_a_batch * done)
        record._print_now_and_then(a_trainer(done), module, seconds_a_batch * done)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 19  # a twentieth of the run apart, which here is more than a minute
    assert lines[4] == "epoch 3/10  step 50/100  train loss 1.500 accuracy 0.2500  37:30 left"


def test_without_an_end_a_line_comes_once_a_minute_and_tells_of_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, module = RunRecord(), SimpleNamespace()
    for now in range(0, 300, 10):
        trainer = a_trainer(now, max_epochs=-1)
        record._print_now_and_then(trainer, module, float(now))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0] == "epoch 3  step 60/100"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_a_time_reads_as_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1000),
        ({"accumulate_grad_batches": 30}, 1000),  # four steps an epoch, the last of 10 batches
        ({"max_steps": 50}, 50),
        ({"max_steps": 50, "accumulate_grad_batches": 4, "max_epochs": -1}, 200),
        ({"max_epochs": -1}, None),
        ({"num_training_batches": float("inf")}, None),  # of a loader without a length
    ],
)
def test_the_length_of_a_run_is_counted_in_batches(settings: dict[str, Any], expected: int | None) -> None:
    assert total_batches(a_trainer(0, **settings)) == expected

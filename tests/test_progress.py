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
from project.run.callbacks import ProgressBar
from tests.conftest import ROOT, clean_environment


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


def test_on_a_terminal_it_counts_to_the_last_batch(tmp_path: Path) -> None:
    leader, terminal = pty.openpty()
    flags = ["--data.source", "synthetic", "--max_epochs", "2", "--trainer.limit_train_batches", "7", "--log_dir", tmp_path]
    command = [sys.executable, ROOT / "scripts" / "train.py", "--accelerator", "cpu", "--devices", "1", *flags]
    environment = {**clean_environment(), "TERM": "xterm", "COLUMNS": "150"}
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
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode()).replace("\r", "\n")
    assert "7/7" in text
    assert re.search(r"^epoch 2/2 .* images/s\s*$", text, re.MULTILINE)

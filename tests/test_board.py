"""What TensorBoard shows of a run: in its files, and in a real browser."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from project.run.board import _send_graph, pixels_of, send_picture, send_text
from tests.browser import CHROMIUM, Browser
from tests.conftest import ROOT, Run, clean_environment

SCREENSHOTS = ROOT / "tests" / "screenshots"  # kept, to be looked at


def values(folder: Path) -> Iterator[tuple[int, Any]]:
    """Every value in a run's event files, and its step."""
    for path in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                yield event.step, value


def test_every_tag_is_there_once_a_step(run: Run) -> None:
    seen = Counter((value.tag, step) for step, value in values(run.folder) if not value.tag.startswith("_hparams_"))
    assert [place for place, times in seen.items() if times > 1] == []
    assert len(seen) > 60


def test_pictures_texts_and_graph_are_where_they_belong(run: Run) -> None:
    steps: dict[str, list[int]] = {}
    for step, value in values(run.folder):
        steps.setdefault(value.tag.removesuffix("/text_summary"), []).append(step)
    assert steps["train/batch"] == [49]  # with the first point
    assert steps["val/confusion_matrix"] == steps["val/loss"] == [83, 167]
    assert steps["val/worst_mistakes"] == [83, 167]
    assert steps["test/confusion_matrix"] == steps["test/worst_mistakes"] == steps["test/loss"] == [168]
    assert steps["command"] == steps["configuration"] == [0]
    assert steps["speed/step_milliseconds"] == steps["device/cpu_percent"] == steps["device/cpu_memory_mib"]
    assert steps["speed/step_milliseconds"] == steps["train/loss"]
    graph = EventAccumulator(str(run.folder), size_guidance={"tensors": 0}).Reload().Graph()
    assert any("features" in node.name and "Conv2d" in node.name for node in graph.node)


def test_what_is_measured_is_plausible_and_agrees(run: Run) -> None:
    figures = {(value.tag, step): value.tensor.float_val[0] for step, value in values(run.folder) if value.tensor.float_val}
    for step in (49, 83, 99, 149, 167):
        speed, milliseconds = figures["speed/images_per_second", step], figures["speed/step_milliseconds", step]
        assert speed * milliseconds / 1000 == pytest.approx(64, rel=1e-4)
        assert 0 < figures["device/cpu_percent", step] < 110  # of one thread, in the mean of two processes
        assert 100 < figures["device/cpu_memory_mib", step] < 4000


def test_the_text_has_the_command_and_the_configuration(run: Run) -> None:
    texts = {
        value.tag: value.tensor.string_val[0].decode()
        for _, value in values(run.folder)
        if value.tag.endswith("text_summary")
    }
    assert "scripts/train.py --accelerator cpu --strategy ddp --devices 2 --max_epochs 2" in texts["command/text_summary"]
    assert "2 x cpu" in texts["command/text_summary"]
    assert f"torch {torch.__version__}" in texts["command/text_summary"]
    assert "class_path: project.model.networks.ConvNet" in texts["configuration/text_summary"]


def test_the_pixels_of_a_batch_are_found_again_to_the_last_bit() -> None:
    mean, std = [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]
    pixels = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8)
    seen = (pixels - 255 * torch.tensor(mean)[:, None, None]) / (255 * torch.tensor(std)[:, None, None])
    trainer: Any = SimpleNamespace(datamodule=SimpleNamespace(mean=mean, std=std))
    assert torch.equal(pixels_of(trainer, seen), pixels)
    assert torch.equal(pixels_of(SimpleNamespace(datamodule=None), pixels / 255), pixels)  # type: ignore[arg-type]


def test_pictures_go_to_every_logger_that_takes_them(tmp_path: Path) -> None:
    class Takes(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.taken: list[Any] = []

        def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
            self.taken.append((key, images[0].shape, step))

    takes, board = Takes(), TensorBoardLogger(tmp_path)
    loggers = [CSVLogger(tmp_path), takes, board]
    send_picture(loggers, "a/picture", np.zeros((5, 6, 3), np.uint8), 7)
    send_text(loggers, "words", "some", 3)
    board.experiment.close()
    assert takes.taken == [("a/picture", (5, 6, 3), 7)]
    assert {(value.tag, step) for step, value in values(Path(board.log_dir))} == {
        ("a/picture", 7),
        ("words/text_summary", 3),
    }


def test_a_network_that_cannot_be_traced_is_one_warning_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Untraceable(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("first line\nsecond line")

    board, network = TensorBoardLogger(tmp_path), Untraceable()
    with pytest.warns(UserWarning, match=r"cannot follow \(first line\)"):
        _send_graph([board], network, torch.zeros(1, 3, 8, 8))
    board.experiment.close()
    assert capsys.readouterr().out == ""
    assert network.training


@pytest.fixture(scope="module")
def address(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard's server, on the folder of the run."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        run.folder.parents[1],
        "--port",
        0,
        "--host",
        "127.0.0.1",
    ]
    log = tmp_path_factory.mktemp("tensorboard") / "log.txt"
    with open(log, "w") as file:
        process = subprocess.Popen(list(map(str, command)), stderr=file, env=clean_environment(), start_new_session=True)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"http://127.0.0.1:\d+", log.read_text())):
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield found[0]
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; apt-get install chromium")
def test_a_real_browser_shows_it_all(run: Run, address: str, tmp_path: Path) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{address}/#scalars")
        groups = ["train", "val", "test", "test_accuracy_by_class", "speed", "device", "learning_rate", "hparams"]
        browser.wait_for(*groups, "version_0")
        browser.screenshot(SCREENSHOTS / "scalars.png")
        browser.open(f"{address}/#images")
        browser.wait_for("confusion_matrix", "worst_mistakes", "train/batch", pictures=1)
        browser.screenshot(SCREENSHOTS / "images.png")
        browser.open(f"{address}/#timeseries")  # what is seen first, without a click
        browser.wait_for("val 5 cards")
        browser.click("val")  # one click
        browser.wait_for("/accuracy", "/loss", "/confusion_matrix", "/worst_mistakes", pictures=1)
        browser.screenshot(SCREENSHOTS / "timeseries.png")
        browser.open(f"{address}/#graphs")
        browser.wait_for("ConvNet")
        browser.screenshot(SCREENSHOTS / "graphs.png")
        browser.open(f"{address}/#text")
        browser.wait_for("configuration", "command", "--strategy ddp --devices 2", "project.model.networks.ConvNet")
        browser.screenshot(SCREENSHOTS / "text.png")
        browser.open(f"{address}/#hparams")
        browser.wait_for("hparams/test_accuracy", "default/version_0", f"{run.summary['test_accuracy']:.4g}"[:5])
        browser.screenshot(SCREENSHOTS / "hparams.png")

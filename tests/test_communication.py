"""The cost of communication on paper: formulas that have a known answer, and the README's table."""

import random
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from benchmarks.communication import (
    BUCKET,
    FIRST_BUCKET,
    GRADIENTS,
    buckets,
    paper,
    ring_seconds,
    slowest,
    step_seconds,
)

from project.model.networks import ConvNet
from tests.conftest import ROOT


def test_the_gradients_are_as_large_as_the_networks() -> None:
    assert GRADIENTS["default"] == sum(4 * p.numel() for p in ConvNet().parameters())
    parameters = GRADIENTS["articles'"] // 4
    assert f"{parameters:,} parameters" in " ".join((ROOT / "README.md").read_text().split())  # a slow test counts them


def test_a_ring_sends_each_tensor_twice_whatever_the_number_of_devices() -> None:
    assert ring_seconds(8e9, 2, 1e9, 0) == 8
    assert ring_seconds(8e9, 1024, 1e9, 0) == pytest.approx(2 * 8 * 1023 / 1024)
    assert ring_seconds(0, 9, 1e9, 1e-3) == pytest.approx(16e-3)


def test_buckets_are_those_of_distributed_data_parallel() -> None:
    assert buckets(1000) == [1000]
    assert buckets(FIRST_BUCKET + 2 * BUCKET + 7) == [FIRST_BUCKET, BUCKET, BUCKET, 7]


def test_a_step_waits_for_what_cannot_be_sent_beside_backward() -> None:
    assert step_seconds(1.0, [100], 2, 1e12, 0) == pytest.approx(1.0)
    assert step_seconds(1.0, [100], 2, 100, 0) == pytest.approx(2.0)  # one bucket is ready at the very end
    assert step_seconds(1.0, [50, 50], 2, 1000, 0) == pytest.approx(1.05)  # the first is sent meanwhile
    assert step_seconds(1.0, [50, 50], 2, 50, 0) == pytest.approx(1 / 3 + 1 / 3 + 2)  # neither is, but for the start


def test_the_slowest_is_as_drawing_shows() -> None:
    assert slowest([1.0, 1.0], 7) == pytest.approx(1)
    assert slowest([0.0, 1.0], 2) == pytest.approx(0.75)
    draw = random.Random(0)
    times = [draw.gauss(10, 1) for _ in range(200)]
    drawn = statistics.mean(max(draw.choices(times, k=8)) for _ in range(20_000))
    assert slowest(times, 8) == pytest.approx(drawn, abs=0.03)


def test_the_readme_has_this_very_table() -> None:
    assert "\n".join(paper()) in (ROOT / "README.md").read_text()

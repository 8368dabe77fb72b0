"""The cost of communication on paper: formulas that have a known answer, and the table of docs/measured.md."""

import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from benchmarks.communication import (
    ARTICLES,
    Bucket,
    buckets,
    paper,
    ring_seconds,
    slowest,
    step_seconds,
)
from torch import nn

from project.model.networks import ConvNet
from tests.conftest import ROOT


def test_a_ring_sends_each_tensor_twice_whatever_the_number_of_devices() -> None:
    assert ring_seconds(8e9, 2, 1e9, 0) == 8
    assert ring_seconds(8e9, 1024, 1e9, 0) == pytest.approx(2 * 8 * 1023 / 1024)
    assert ring_seconds(0, 9, 1e9, 1e-3) == pytest.approx(16e-3)


@pytest.mark.parametrize("network", [{}, ARTICLES], ids=["default", "articles'"])
def test_buckets_are_those_of_distributed_data_parallel(network: dict[str, Any]) -> None:
    with torch.device("meta"):
        parameters = [*ConvNet(**network).parameters()][::-1]
        found = buckets(ConvNet(**network))
    assigned, _ = torch.distributed._compute_bucket_assignment_by_size(
        parameters, [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20], [False] * len(parameters)
    )
    assert [bucket.size for bucket in found] == [sum(4 * parameters[i].numel() for i in part) for part in assigned]
    assert [bucket.done for bucket in found] == sorted(bucket.done for bucket in found)
    assert found[-1].done == 1


def test_backward_is_where_the_products_are() -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 2000, 1), nn.AdaptiveAvgPool2d(10), nn.Flatten(), nn.Linear(200_000, 10))
    last, first = buckets(network, image_size=8)
    assert last.size == 4 * (10 + 2_000_000)
    assert last.done == pytest.approx(2_000_000 / (2_000_000 + 64 * 6000))
    assert first == Bucket(4 * 8000, 1)


def test_a_step_waits_for_what_cannot_be_sent_beside_backward() -> None:
    half, whole = Bucket(50, 0.5), Bucket(50, 1)
    assert step_seconds(1.0, [Bucket(100, 1)], 2, 1e12, 0) == pytest.approx(1.0)
    assert step_seconds(1.0, [Bucket(100, 1)], 2, 100, 0) == pytest.approx(2.0)  # one bucket is ready at the very end
    assert step_seconds(1.0, [half, whole], 2, 1000, 0) == pytest.approx(1.05)  # the first is sent meanwhile
    assert step_seconds(1.0, [half, whole], 2, 50, 0) == pytest.approx(1 / 3 + 1 / 3 + 2)  # neither is, but for the start


def test_the_slowest_is_as_drawing_shows() -> None:
    assert slowest([1.0, 1.0], 7) == pytest.approx(1)
    assert slowest([0.0, 1.0], 2) == pytest.approx(0.75)
    draw = random.Random(0)
    times = [draw.gauss(10, 1) for _ in range(200)]
    drawn = statistics.mean(max(draw.choices(times, k=8)) for _ in range(20_000))
    assert slowest(times, 8) == pytest.approx(drawn, abs=0.03)


def test_the_page_of_measurements_has_this_very_table() -> None:
    assert "\n".join(paper()) in (ROOT / "docs" / "measured.md").read_text()

"""What adding up the gradients costs: measured on two processes, and on paper and by simulation for any number."""

import functools
import math
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import nn

from benchmarks.measure import QUICK_STEPS, ROOT, SYNTHETIC_TRAINING_IMAGES, Row, Settings, python
from benchmarks.turns import EPOCHS_BESIDE, Program, take_turns, training
from project.model.networks import ConvNet

ARTICLES = {"channels": (32, 64, 512, 1024, 2048, 4096), "hidden": 5000, "activation": "none"}
BUCKET, FIRST_BUCKET = 25 * 2**20, 2**20  # bytes that DistributedDataParallel sends at once, unless told otherwise
BACKWARD = 2 / 3  # of a step's computing, as the forward pass has half as many products
LARGE = 64 * 2**20
DEVICES = (2, 8, 64, 1024)
NETWORKS = {"10 Gbit/s": (1.25e9, 50e-6), "100 Gbit/s": (12.5e9, 10e-6), "NVLink, 300 GB/s": (300e9, 5e-6)}  # bytes/s, s
COMPUTING = {"default": 0.08, "articles'": 0.2}  # seconds of a step on one device


def ring_seconds(size: float, devices: int, bandwidth: float, latency: float) -> float:
    """Return how long a ring takes to add up a tensor on all devices.

    Each sends 2 (N - 1) messages of an N-th of the tensor, one after another. Source: Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009.

    Args:
        size: Of the tensor, in bytes.
        devices: Their number, N.
        bandwidth: Bytes a second, of each link, in each direction.
        latency: Seconds from sending a message to its beginning to arrive.
    """
    return 2 * (devices - 1) * (latency + size / devices / bandwidth)


@dataclass(frozen=True)
class Bucket:
    """Gradients that DistributedDataParallel sends at once.

    Attributes:
        size: In bytes.
        done: The share of backward that is done when the last of them is there, from 0 to 1.
    """

    size: int
    done: float


def buckets(network: nn.Module, image_size: int = 32) -> list[Bucket]:
    """Return a network's buckets in the order in which backward has them, as DistributedDataParallel fills them.

    A gradient is never split: a bucket is full when it has reached its bytes. Backward's time is taken to go where the
    products of the forward pass go.

    Args:
        network: Of convolutions and linear layers, on the meta device; its gradients are float32.
        image_size: Side of its images.
    """
    positions: dict[nn.Module, int] = {}
    layers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, _, output: positions.update({layer: math.prod(output.shape[2:])}))
    network(torch.zeros(1, 3, image_size, image_size, device="meta"))
    gradients = [(p, positions[layer]) for layer in layers for p in layer.parameters()]
    total = sum(p.numel() * times for p, times in gradients if p.dim() > 1)
    found, size, products, limit = [], 0, 0, FIRST_BUCKET
    for number, (parameter, times) in enumerate(reversed(gradients), start=1):
        size += 4 * parameter.numel()
        products += parameter.numel() * times if parameter.dim() > 1 else 0
        if size >= limit or number == len(gradients):
            found.append(Bucket(size, products / total))
            size, limit = 0, BUCKET
    return found


@functools.cache
def buckets_of(name: str) -> tuple[Bucket, ...]:
    """Return the buckets of "default" or "articles'"."""
    with torch.device("meta"):
        network = ConvNet() if name == "default" else ConvNet(**ARTICLES)  # type: ignore[arg-type]
    return tuple(buckets(network))


def step_seconds(computing: float, sent: Sequence[Bucket], devices: int, bandwidth: float, latency: float) -> float:
    """Return how long a step takes in which buckets of gradients are sent while backward still computes.

    A bucket waits for the one before it.

    Args:
        computing: Seconds of forward and backward pass and optimizer, on one device alone.
        sent: The buckets, in their order.
        devices: Their number.
        bandwidth: As in `ring_seconds`.
        latency: As in `ring_seconds`.
    """
    now = 0.0
    for bucket in sent:
        ready = computing * (1 - BACKWARD) + computing * BACKWARD * bucket.done
        now = max(now, ready) + ring_seconds(bucket.size, devices, bandwidth, latency)
    return max(now, computing)


def slowest(seconds: Sequence[float], devices: int) -> float:
    """Return how long the slowest of so many devices takes for a step, on average, where each takes one of these times.

    All wait for it. It is the mean of the greatest of N draws: the i-th smallest of n is it with probability
    (i / n)^N - ((i - 1) / n)^N.
    """
    ordered, n = sorted(seconds), len(seconds)
    return sum(value * (((i + 1) / n) ** devices - (i / n) ** devices) for i, value in enumerate(ordered))


def efficiency(network: str, devices: int, link: str) -> float:
    """Return the share of its time that a device computes, with as many images on each device as on one."""
    computing = COMPUTING[network]
    return computing / step_seconds(computing, buckets_of(network), devices, *NETWORKS[link])


def paper() -> list[str]:
    """Return the table of docs/measured.md, in Markdown."""
    lines = [
        "| network, a step of | link | " + " | ".join(f"{n:,}" for n in DEVICES) + " |",
        "|---" * (2 + len(DEVICES)) + "|",
    ]
    for network, seconds in COMPUTING.items():
        for link in NETWORKS:
            shares = " | ".join(f"{efficiency(network, n, link):.3f}" for n in DEVICES)
            lines.append(f"| {network}, {1e3 * seconds:.0f} ms | {link} | {shares} |")
    return lines


def communication(settings: Settings) -> list[Row]:
    """What gloo takes, and how many times as fast two processes are as one: predicted by it, and measured."""
    size = sum(bucket.size for bucket in buckets_of("default"))
    gradients = f"the default network's gradients, {size:,} bytes"
    reduced: dict[str, list[float]] = {"4 bytes": [], gradients: [], f"{LARGE:,} bytes": []}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for turn in range(settings.repeats):
        sizes = (4, size, LARGE)
        output = python(*torchrun, ROOT / "scripts/benchmarks/all_reduce.py", "--bytes", *sizes, threads=1)
        found = re.findall(r"^\d+ bytes ([\d.]+) ms$", output, re.MULTILINE)
        for values, text in zip(reduced.values(), found, strict=True):
            values.append(float(text))
        told = ", ".join(f"{name}: {values[-1]:.3f} ms" for name, values in reduced.items())
        print(f"communication  round {turn + 1}/{settings.repeats}  {told}", flush=True)
    small, _, large = (statistics.median(values) / 1e3 for values in reduced.values())
    latency, bandwidth = small / 2, LARGE / (large - small)  # of a ring of two: 2 messages of half the tensor

    epochs = ["--max_epochs", settings.epochs + EPOCHS_BESIDE, *settings.shorter]
    alone = [*epochs, "--devices", 1]
    sides: dict[str, Program] = {
        "2 processes": training(*epochs, "--devices", 2, "--strategy", "ddp", threads=1),
        "1 process": training(*alone, threads=1),
        "1 process, half the batch": training(*alone, "--batch_size", 32, threads=1),
    }
    speeds = take_turns("communication", sides, settings.epochs)
    single = _step_seconds_of_one(epochs, QUICK_STEPS if settings.quick else SYNTHETIC_TRAINING_IMAGES // 32)
    waiting = slowest(single, 2) / statistics.mean(single)
    times: dict[str, list[float]] = {"predicted": [], "measured": []}
    for two, one, half in zip(*speeds.values(), strict=True):
        step = step_seconds(waiting * 32 / half, buckets_of("default"), 2, bandwidth, latency)
        times["predicted"].append(64 / one / step)
        times["measured"].append(two / one)
    ratio = statistics.median(times["predicted"]) / statistics.median(times["measured"])
    more = {"bandwidth, bytes/s": bandwidth, "latency, s": latency, "speeds, images/s": speeds}
    more["time of the slower of two steps, over a step's"] = waiting
    return [
        Row("communication", "gloo's all-reduce on 2 processes", "ms", reduced, ("GB/s", bandwidth / 1e9)),
        Row("communication", "ddp on 2 over 1", "times", times, ("predicted over measured", ratio), more),
    ]


def _step_seconds_of_one(epochs: list[object], steps: int) -> list[float]:
    """Return the time of every training step, but those of the first epoch, of one process with half of the batch."""
    with tempfile.TemporaryDirectory() as logs:
        where = ["--data.source", "synthetic", "--accelerator", "cpu", "--devices", 1, "--trainer.limit_test_batches", 1]
        each = ["--batch_size", 32, "--trainer.log_every_n_steps", 1, "--log_dir", logs]
        python(ROOT / "scripts/train.py", *epochs, *where, *each, threads=1)
        return [
            value.tensor.float_val[0] / 1e3
            for file in Path(logs).glob("*/*/events.*")
            for event in EventFileLoader(str(file)).Load()
            for value in event.summary.value
            if value.tag == "speed/step_milliseconds" and event.step > steps
        ]

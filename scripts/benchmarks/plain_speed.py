"""The work of the published record (airbench94_muon) in plain PyTorch, for comparison with configs/speed.yaml.

2,000 images a step, the network in bfloat16 but for its BatchNorms, torch's own convolutions and memory; no compilation, as
there is on a GPU. The whitening's bias is trained in 3 of its 8 epochs, so there are two kinds of step. Written anew from
its description; the images are there already, so that whitening, loading and augmentation cost it nothing. It learns
nothing: it says how fast the steps are, and one view of test images.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the `project` of this clone

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from project.model.optimizers import Muon


def group(before, after):
    def convolution(channels):
        return nn.Conv2d(channels, after, 3, padding=1, bias=False)

    def norm():
        layer = nn.BatchNorm2d(after, eps=1e-12, momentum=0.4)
        layer.weight.requires_grad_(False)
        return layer

    return nn.Sequential(
        *(convolution(before), nn.MaxPool2d(2), norm(), nn.GELU()),
        *(convolution(after), norm(), nn.GELU()),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    flags = parser.parse_args()
    whiten = nn.Conv2d(3, 24, 2)
    whiten.weight.requires_grad_(False)
    groups = (group(24, 64), group(64, 256), group(256, 256))
    network = nn.Sequential(whiten, nn.GELU(), *groups, nn.MaxPool2d(3), nn.Flatten(), nn.Linear(256, 10, bias=False))
    network.to(torch.bfloat16, memory_format=torch.channels_last)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.float()
    optimizer = Muon(network.parameters(), lr=0.24, momentum=0.6)
    images = torch.randn(2000, 3, 32, 32).to(torch.bfloat16, memory_format=torch.channels_last)
    labels = torch.randint(10, (2000,))

    def say(what, start):
        print(f"{what}: {2000 / (time.perf_counter() - start):,.0f} images/s", flush=True)

    for number in range(1 + flags.steps):  # the first warms up
        for trained in (True, False):
            start = time.perf_counter()
            whiten.bias.requires_grad_(trained)
            optimizer.zero_grad()
            cross_entropy(network(images) / 256, labels, label_smoothing=0.2).backward()
            optimizer.step()
            say(f"{'bias' if trained else 'step'} {number}", start)
    network.eval()
    with torch.no_grad():
        for number in range(1 + flags.steps):
            start = time.perf_counter()
            network(images)
            say(f"view {number}", start)

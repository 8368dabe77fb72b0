"""What the tests share: running the real scripts in clean processes, and small image folders."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
REAL_CIFAR10 = ROOT / "data" / "cifar10-png"
NARROW = ["--model.network.channels", "[4,4,8,8,8,8]", "--model.network.hidden", "16"]


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a new shell: none of the variables that launchers leave behind, no network, one thread."""
    left_by_launchers = (
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "MASTER_",
        "PL_",
        "TORCHELASTIC",
        "SLURM",
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(left_by_launchers)}
    nowhere = "http://127.0.0.1:9"  # a port that refuses at once
    env |= {"http_proxy": nowhere, "https_proxy": nowhere, "no_proxy": "", "NO_PROXY": ""}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    return {k: v for k, v in (env | extra).items() if v}


def python(*args: object, cwd: Path = ROOT, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments given, its whole process group ended when the time is up."""
    process = subprocess.Popen(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=clean_environment(**env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, 9)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train(cwd: Path, *flags: object, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/train.py in a folder; fails the test, with the output, when it does not end with 0."""
    result = python(ROOT / "scripts" / "train.py", *flags, cwd=cwd, timeout=timeout, **env)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result


ImageFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    """Make a folder source: `image_folder(train=[n, ...], test=[n, ...], val=None)`, images by class."""

    def make(train: list[int], test: list[int], val: list[int] | None = None, seed: int = 0) -> Path:
        root = tmp_path_factory.mktemp("images")
        random = np.random.default_rng(seed)
        for split, counts in {"train": train, "test": test, "val": val or []}.items():
            for label, count in enumerate(counts):
                folder = root / split / f"class{label}"
                folder.mkdir(parents=True)
                for number in range(count):
                    pixels = random.integers(0, 156, (32, 32, 3)) + 100 * (label % 2)
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:04}.png")
        return root

    return make


@dataclass
class Run:
    """A finished run: what it printed, and its directory."""

    output: str
    errors: str
    folder: Path
    summary: dict


def run_of(cwd: Path, result: subprocess.CompletedProcess[str], name: str = "default", version: int = 0) -> Run:
    folder = cwd / "logs" / name / f"version_{version}"
    return Run(result.stdout, result.stderr, folder, json.loads((folder / "summary.json").read_text()))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name a cache of decoded images shared by the tests."""
    return ["--data.cache_dir", str(tmp_path_factory.mktemp("cache"))]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, cache: list[str]) -> Run:
    """The bare command on two processes, offline, two epochs; not to be changed by a test."""
    cwd = tmp_path_factory.mktemp("run")
    flags = ["--accelerator", "cpu", "--strategy", "ddp", "--devices", "2", "--max_epochs", "2"]
    return run_of(cwd, train(cwd, *flags, *cache))


@pytest.fixture(scope="session")
def finished_run(run: Run) -> Path:
    """Its directory."""
    return run.folder

"""The README's "Make it yours", done word for word in a copy of the repository."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import project
from tests.conftest import ROOT, clean_environment

SECTION = (ROOT / "README.md").read_text().partition("\n## Make it yours\n")[2].partition("\n## ")[0]
pytestmark = pytest.mark.alone

NOT_COPIED = (".git", ".venv", "data", "*.egg-info", "__pycache__", ".*_cache")


def run(command: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a line as a shell does; fails the test, with the output, when it does not end with 0."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in an environment that is activated
    env = clean_environment(PATH=tools)
    result = subprocess.run(
        command, shell=True, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


def copy_of_the_repository(place: Path) -> Path:
    """Copy it as a clone has it, with a history of one commit."""
    clone = place / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*NOT_COPIED))
    shutil.copytree(ROOT / "project" / "data", clone / "project" / "data", dirs_exist_ok=True)  # the room, not data/
    run("git init -q && git add -A", clone)
    run("git -c user.name=a -c user.email=a@b.c commit -qm 'As it was cloned'", clone)
    return clone


def files() -> dict[str, str]:
    """The files that the section has one write, by their names."""
    return dict(re.findall(r"`(project/\w+/\w+\.py)`[^`]*:\n\n```python\n(.*?)```", SECTION, re.DOTALL))


def commands() -> list[str]:
    blocks = re.findall(r"```(\w*)\n(.*?)```", SECTION, re.DOTALL)
    return [line for language, block in blocks if not language for line in block.splitlines()]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy with images of the reader's: three classes of two or three colours, as files and as an archive."""
    clone, draw = copy_of_the_repository(tmp_path), np.random.default_rng(0)

    def picture(label: int, size: tuple[int, int]) -> np.ndarray:
        pixels = draw.integers(0, 120, (*size, 3))
        pixels[..., label] += 120
        return pixels.astype(np.uint8)

    for label, name in enumerate(("red", "green", "blue")):
        folder = clone / "my_images" / name
        folder.mkdir(parents=True)
        for number in range(40):
            Image.fromarray(picture(label, (50 + number, 70))).save(folder / f"{number}.png")
    arrays = {"class_names": np.array(["red", "green", "blue"])}
    for split, count in (("train", 120), ("test", 31)):
        labels = arrays[f"{split}_labels"] = np.arange(count) % 3
        arrays[f"{split}_images"] = np.stack([picture(label, (28, 28)) for label in labels])
    np.savez(clone / "images.npz", **arrays)
    return clone


def test_its_files_are_linted_as_the_rest_is(tmp_path: Path) -> None:
    clone = copy_of_the_repository(tmp_path)
    for path, text in files().items():
        (clone / path).write_text(text)
    run("ruff check . && ruff format --check .", clone)


@pytest.mark.slow
def test_make_it_yours_word_for_word(clone: Path) -> None:
    """Through train, evaluate, predict and export, on one process and on two."""
    assert len(files()) == 2
    for path, text in files().items():
        (clone / path).write_text(text)
    for kind in ("train", "evaluate", "predict", "export"):
        assert any(f"scripts/{kind}.py" in command for command in commands()), kind
    for command in commands():
        printed = run(command, clone).stdout
        if "--csv" in command:
            rows = list(csv.DictReader((clone / "labels.csv").read_text().splitlines()))
            right = [row["label"] == Path(row["file"]).parent.name for row in rows]
            assert len(right) == 120
            assert sum(right) > 100
        if "evaluate.py" in command:
            assert re.search(r"test images, each counted once\naccuracy +(0\.[89]|1)", printed), printed
    for name in ("resnet/version_0", "npz/version_1"):
        for kind in ("best.weights.pth", "best.pt2", "best.onnx"):
            assert (clone / "logs" / name / "checkpoints" / kind).is_file()
    changed = run(f"git status --porcelain {project.__name__}", clone).stdout.splitlines()
    assert len(changed) <= 2
    assert sorted(changed) == sorted(f"?? {path}" for path in files())

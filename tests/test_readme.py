"""What the README says is run, read out of the README."""

import json
import re
import shlex
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser as torchrun_parser

from project.run.flags import OWN_FLAGS, SHORT_FLAGS
from tests.conftest import ROOT, python

README = (ROOT / "README.md").read_text()


def blocks(language: str, heading: str = "") -> list[str]:
    """The blocks of a language, in the whole text or below one heading."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0] if heading else README
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a clone holds of what the commands need."""
    for folder in ("project", "scripts", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_there_are_two_commands_that_install_and_train_and_install_and_test() -> None:
    train, test = (block.strip() for block in blocks("bash")[:2])
    assert train == "pip install -e . && python scripts/train.py --strategy ddp --devices 2"
    assert test == 'pip install -e ".[test]" && pytest'


def test_every_flag_it_names_is_a_flag() -> None:
    table = README.partition("\n## The flags\n")[2].partition("\n## Make it yours\n")[0]
    named = set(re.findall(r"--(\w+)", table))
    assert named - {"trainer", "data", "help", "config"} <= {*SHORT_FLAGS, *OWN_FLAGS}
    assert {*SHORT_FLAGS, *OWN_FLAGS} <= named


def test_its_torchrun_commands_are_torchruns() -> None:
    commands = [shlex.split(text) for text in re.findall(r"`[A-Z_=1 ]*torchrun (.*?)`", README)]
    assert len(commands) >= 2
    for command in commands:
        given = torchrun_parser().parse_args(command)  # ends the process where it does not know a flag
        assert given.training_script in ("scripts/train.py", "scripts/manual/ddp.py") or "..." in command


def test_its_links_to_its_own_sections_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= sections


@pytest.mark.slow
def test_its_first_command_trains_within_three_minutes(clone: Path) -> None:
    command = blocks("bash")[0].partition("&& python ")[2].split()
    start = time.monotonic()
    result = python(*command, cwd=clone, timeout=400, OMP_NUM_THREADS="")
    seconds = time.monotonic() - start
    assert result.returncode == 0, result.stderr
    summary = json.loads((clone / "logs" / "default" / "version_0" / "summary.json").read_text())
    assert (summary["dataset"], summary["world_size"], summary["strategy"]) == ("synthetic", 2, "ddp")
    assert summary["test_accuracy"] >= 0.90
    assert seconds < 180


@pytest.mark.slow
def test_its_python_program_runs(clone: Path) -> None:
    (program,) = blocks("python", "What is where")
    (clone / "own.py").write_text(f"{program}\nprint('trained')\n")
    result = python("own.py", cwd=clone, timeout=400, OMP_NUM_THREADS="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("trained") == 2  # once in each process


@pytest.mark.slow
def test_its_hand_written_program_and_the_template_end_with_the_same_numbers(clone: Path) -> None:
    commands = re.findall(r"^python (scripts/manual/cpu.py.*)\npython (scripts/train.py.*)$", README, re.MULTILINE)[0]
    for command in commands:
        result = python(*command.split(), cwd=clone, timeout=400, OMP_NUM_THREADS="")
        assert result.returncode == 0, result.stderr
    for epoch in (0, 1):
        by_hand = torch.load(clone / "logs" / "manual" / "cpu" / f"epoch_{epoch}.pth", weights_only=True)
        path = clone / "logs" / "default" / "version_0" / "weights" / f"epoch_{epoch}.pth"
        templates = torch.load(path, weights_only=True)
        assert all(torch.equal(by_hand[name], templates[name]) for name in by_hand | templates)

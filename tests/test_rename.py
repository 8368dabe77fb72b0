"""scripts/rename.py in copies of the repository, in an environment where this one's package is installed."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import project
from tests.conftest import python
from tests.test_make_it_yours import copy_of_the_repository, run

OLD = project.__name__
NEW = "z" + OLD[:5]  # another than its own, sorted behind `tests`, and short, so that no line gets too long


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return copy_of_the_repository(tmp_path)


def rename(clone: Path, *name: str) -> subprocess.CompletedProcess[str]:
    return python(clone / "scripts" / "rename.py", *name, cwd=clone.parent)


def test_a_renamed_clone_uses_its_own_package_and_is_linted(clone: Path) -> None:
    before = run("git rev-parse HEAD", clone).stdout
    result = rename(clone, NEW)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"renamed   {OLD} to {NEW}, in ")
    assert not (clone / OLD).exists()
    left = run(
        rf"git grep -nE '(from|import) {OLD}\b|\b{OLD}\.(model|data|run)\b|\b{OLD}/' -- ':!tests/test_rename.py' || true",
        clone,
    ).stdout
    assert left == ""
    assert run("git rev-parse HEAD", clone).stdout == before
    assert "[project]" in (clone / "pyproject.toml").read_text()  # pyproject.toml's own word
    assert f'name = "{NEW}"' in (clone / "pyproject.toml").read_text()
    run("ruff check . && ruff format --check .", clone)
    (clone / NEW / "model" / "networks.py").write_text("raise SystemExit('its own package')\n")
    result = python(clone / "scripts" / "train.py", "--explain", "--data.source", "synthetic", cwd=clone.parent)
    assert "its own package" in result.stderr


def test_a_rename_can_be_undone_and_done_again_and_takes_rooms_of_the_users_own(clone: Path) -> None:
    room = clone / OLD / "nets"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (clone / "mine.yaml").write_text(f"class_path: {OLD}.nets.mine.Net\n")
    (clone / "untidy.py").write_text("x  =  1\n")
    (clone / "link").symlink_to("scripts")
    run("git add -A && git -c user.name=a -c user.email=a@b.c commit -qm Mine", clone)
    assert rename(clone, NEW).returncode == 0
    python(clone / "scripts" / "evaluate.py", "--help", cwd=clone)
    run("git reset --hard -q", clone)
    again = rename(clone, NEW)
    assert again.returncode == 0, again.stderr
    assert (clone / "mine.yaml").read_text() == f"class_path: {NEW}.nets.mine.Net\n"
    assert (clone / "untidy.py").read_text() == "x  =  1\n"


def test_the_english_word_stays() -> None:
    from project.run.rename import MENTIONS

    prose = (
        "a project template; this project's tests. Projects of [project] and [project.optional-dependencies], my-project/"
    )
    assert MENTIONS.sub("x", prose.replace("project", OLD)) == prose.replace("project", OLD)
    named = f'from {OLD}.run import a; import {OLD}; {OLD}/data/x.py; "{OLD}"; `{OLD}`; {OLD}.model.networks; {OLD}[onnx]'
    assert OLD not in MENTIONS.sub("x", named).replace(f"{OLD}[onnx]", "")
    assert MENTIONS.sub("x", f'"{OLD}[onnx]"') == '"x[onnx]"'


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "cannot be the name of a package"),
        ("my-project", "cannot be the name of a package"),
        ("class", "cannot be the name of a package"),
        ("2fast", "cannot be the name of a package"),
        ("tests", "is the name of something else in this clone"),
        ("torch", "is the name of another package"),
        ("json", "is the name of another package"),
        (OLD, "is its name already"),
    ],
)
def test_a_name_that_cannot_be_is_one_line_and_changes_nothing(name: str, words: str, clone: Path) -> None:
    result = rename(clone, name)
    assert result.returncode == 2
    assert re.fullmatch(rf"error: '{name}' .*{words}.*\n|error: '{name}' {words}.*\n", result.stderr), result.stderr
    assert run("git status --porcelain", clone).stdout == ""


def with_a_change(clone: Path) -> None:
    (clone / "README.md").write_text("mine")


def with_a_new_file(clone: Path) -> None:
    (clone / "notes.txt").write_text("mine")


def without_history(clone: Path) -> None:
    run("rm -r .git", clone)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (with_a_change, "the tree has changes (README.md)"),
        (with_a_new_file, "the tree has changes (notes.txt)"),
        (without_history, "is no git repository"),
    ],
)
def test_a_tree_that_could_not_be_had_back_is_left_alone(state: Callable[[Path], None], words: str, clone: Path) -> None:
    state(clone)
    result = rename(clone, NEW)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert (clone / OLD).is_dir()


@pytest.mark.slow
def test_a_renamed_clone_passes_its_tests(clone: Path) -> None:
    """The quick ones of every room; the whole suite was run by hand."""
    assert rename(clone, NEW).returncode == 0
    run("git add -A && git -c user.name=a -c user.email=a@b.c commit -qm Renamed", clone)
    quick = ["batches", "cache", "checkpoints", "classifier", "configs", "datamodule", "networks", "optimizers", "steps"]
    tests = [str(Path("tests", f"test_{name}.py")) for name in quick]
    result = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=clone, timeout=500)
    assert result.returncode == 0, result.stdout[-5000:]

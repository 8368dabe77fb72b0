"""The manual steps: one table, shown in three places, and a mark in the code for each."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import project.model.classifier
from project.run.steps import ANY, DDP, DEVICES, DP, GPU, NAMES, PLACES, TABLE, as_text, placed, program_for, replaced_by
from tests.conftest import ROOT

MARK = re.compile(r"# step (\d+)\b")
TEMPLATE = [ROOT / "scripts" / "train.py", *sorted((ROOT / "project").rglob("*.py"))]
# READING: who needs which step
WHO = {
    "cpu": {12, 13, 14, 15},
    "gpu": {2, 3, 9, 11, 12, 13, 14, 15},
    "dp": {2, 3, 8, 9, 10, 11, 12, 13, 14, 15},
    "ddp": set(range(1, 17)),
}
FLAGS = {"cpu": {ANY}, "gpu": {ANY, GPU, DEVICES}, "dp": {ANY, GPU, DEVICES, DP}, "ddp": {ANY, GPU, DEVICES, DDP}}


def marks(*paths: Path) -> list[int]:
    return [int(number) for path in paths for number in MARK.findall(path.read_text())]


def symbol(dotted: str) -> Any:
    """Import what a dotted name stands for."""
    module, names = dotted, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    for name in names:
        found = getattr(found, name)
    return found


# ---- one source


@pytest.mark.parametrize(("name", "lines", "start", "end"), PLACES, ids=[place[0] for place in PLACES])
def test_docstring_and_readme_show_the_table_as_it_is(name: str, lines: list[str], start: str, end: str) -> None:
    text = (ROOT / name).read_text()
    assert text == placed(text, lines, start, end), "run: python -m project.run.steps"


def test_help_on_the_module_shows_it() -> None:
    assert "\n".join(as_text(TABLE)) in (project.model.classifier.__doc__ or "")


def test_the_table_has_every_step_and_says_who_needs_it() -> None:
    assert {row.step for row in TABLE} == set(NAMES) == set(range(1, 17))
    assert [row.step for row in TABLE] == sorted(row.step for row in TABLE)
    for program, steps in WHO.items():
        assert {row.step for row in TABLE if row.flag in FLAGS[program]} == steps


def test_a_command_replaces_the_steps_of_its_hand_written_program() -> None:
    def steps(on_gpu: bool, strategy: str) -> set[int]:
        return {row.step for row in replaced_by(on_gpu, strategy)}

    assert steps(False, "single_device") == steps(False, "dp") == WHO["cpu"]
    assert steps(True, "single_device") == WHO["gpu"]
    assert steps(True, "dp") == WHO["dp"]
    assert steps(True, "ddp") == WHO["ddp"]
    assert steps(False, "ddp") == WHO["ddp"] - {2, 3, 5, 9, 11}
    for on_gpu, strategy in ((False, "single_device"), (True, "single_device"), (True, "dp"), (True, "ddp")):
        assert (ROOT / program_for(on_gpu, strategy)).exists()


# ---- where it happens


def test_every_step_is_marked_once_in_the_template() -> None:
    assert sorted(marks(*TEMPLATE)) == list(range(1, 17))


@pytest.mark.parametrize("step", NAMES)
def test_the_mark_stands_in_what_the_table_names_or_where_lightning_is_called(step: int) -> None:
    symbols = {row.now: symbol(row.now) for row in TABLE if row.step == step}
    ours = [inspect.getsource(found) for name, found in symbols.items() if name.startswith("project.")]
    places = ours or [(ROOT / "scripts" / "train.py").read_text()]
    assert any(f"# step {step}:" in source for source in places), symbols


@pytest.mark.parametrize("program", WHO)
def test_a_hand_written_program_marks_its_steps_each_once_in_order_beside_the_line_that_the_table_shows(
    program: str,
) -> None:
    path = ROOT / "scripts" / "manual" / f"{program}.py"
    assert sorted(marks(path)) == sorted(WHO[program])
    lines = path.read_text().splitlines()
    for row in TABLE:
        if row.flag in FLAGS[program]:
            mark = next(number for number, line in enumerate(lines) if f"# step {row.step}:" in line)
            nearby = "\n".join(lines[mark - 1 : mark + 5]) if row.step > 1 else path.read_text()  # 1 is the shell's
            pieces = ".*".join(re.escape(piece) for piece in row.by_hand.split("..."))
            assert re.search(pieces.replace(r"\ .*", ".*").replace(r".*\ ", ".*"), nearby, re.DOTALL), row


@pytest.mark.parametrize("program", ["shapes_dp", "shapes_ddp"])
def test_the_shapes_programs_use_the_same_numbers(program: str) -> None:
    found = marks(ROOT / "scripts" / "manual" / f"{program}.py")
    assert len(found) == len(set(found)) >= 5
    assert set(found) <= WHO[program.removeprefix("shapes_")]


@pytest.mark.parametrize("path", [*TEMPLATE, *sorted((ROOT / "scripts" / "manual").glob("*.py"))], ids=lambda p: p.name)
def test_every_mark_has_a_word_beside_it(path: Path) -> None:
    text = path.read_text()
    assert len(re.findall(r"# step \d+: \w+", text)) == len(MARK.findall(text))


def test_a_text_without_both_marks_is_left_alone() -> None:
    assert placed("a <b> old </b> c", ["new"], "<b>", "</b>") == "a <b>\nnew\n</b> c"
    for text in ("a <b> old", "old </b> c"):
        with pytest.raises(AssertionError, match="must both be there"):
            placed(text, ["new"], "<b>", "</b>")

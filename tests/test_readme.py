"""What the README and the pages of docs/ say is run, read out of them."""

import json
import re
import shlex
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser as torchrun_parser

from project.model.networks import ConvNet
from project.run.flags import OWN_FLAGS, SHORT_FLAGS
from tests.conftest import ROOT, python

README = (ROOT / "README.md").read_text()
DETAILS = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {"README.md": README} | DETAILS

pytestmark = pytest.mark.alone


def below(heading: str, text: str = README) -> str:
    """The section below a heading."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(language: str, heading: str = "", text: str = README) -> list[str]:
    """The blocks of a language, in the whole text or below one heading."""
    section = below(heading, text) if heading else text
    return [
        block for name, block in re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE) if name == language
    ]


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


def test_it_is_read_in_one_sitting() -> None:
    assert len(README.split()) <= 4500


def test_it_leads_to_every_page_of_details() -> None:
    assert set(re.findall(r"\]\((docs/[\w-]+\.md)", README)) == {*DETAILS}


@pytest.mark.parametrize("text", [below("The flags"), PAGES["docs/flags.md"]], ids=["README.md", "docs/flags.md"])
def test_every_flag_it_names_is_a_flag_and_none_is_left_out(text: str) -> None:
    named = set(re.findall(r"--(\w+)", text))
    assert named - {"trainer", "data", "help", "config"} <= {*SHORT_FLAGS, *OWN_FLAGS}
    assert {*SHORT_FLAGS, *OWN_FLAGS} <= named


@pytest.mark.parametrize("page", PAGES)
def test_its_torchrun_commands_are_torchruns(page: str) -> None:
    commands = [shlex.split(text) for text in re.findall(r"`[A-Z_=1 ]*torchrun (.*?)`", PAGES[page])]
    assert len(commands) >= 2 or page != "README.md"
    for command in commands:
        given = torchrun_parser().parse_args(command)  # ends the process where it does not know a flag
        ours = given.training_script in ("scripts/train.py", "scripts/manual/ddp.py")
        assert ours or "..." in command or page == "docs/comparison.md"  # which has those of other projects


@pytest.mark.parametrize("page", PAGES)
def test_its_links_to_its_own_sections_lead_somewhere(page: str) -> None:
    titles = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGES[page])) <= sections


CHINESE = (ROOT / "README.zh-CN.md").read_text()


def prose(text: str) -> str:
    """A README without its blocks and its line to the other language."""
    return re.sub(
        r"^\[\S+\]\(README\S*\)$", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE
    )


def spans(text: str) -> Counter[str]:
    return Counter(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text)))


def figures(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)*", re.sub(r"`[^`]+`", "", prose(text))))


@pytest.mark.parametrize(
    "part", [spans, figures, lambda text: Counter(re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL))]
)
def test_both_languages_have_the_same_commands_names_and_figures(part) -> None:  # type: ignore[no-untyped-def]
    english, chinese = part(README), part(CHINESE)
    assert len(english) > 10
    assert english == chinese, (english - chinese, chinese - english)


def test_both_languages_have_the_same_sections_rows_and_pictures() -> None:
    for pattern in (r"^#+ ", r"^\|", r"^- ", r"^!\[", r"^<!-- .* -->$"):
        assert len(re.findall(pattern, prose(README), re.MULTILINE)) == len(
            re.findall(pattern, prose(CHINESE), re.MULTILINE)
        ), pattern


def commands() -> list[list[str]]:
    """Every command that runs one of the scripts, in blocks, tables and text of all pages."""
    found = []
    for text in PAGES.values():
        found += [block.replace("\\\n", " ") for block in (*blocks("", "", text), *blocks("bash", "", text))]
        found += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]
    lines = (line.partition("python scripts/") for line in "\n".join(found).splitlines())
    return sorted({tuple(shlex.split(f"scripts/{rest.partition(' && ')[0]}")) for _, python, rest in lines if python})


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({command[0] for command in commands()}))
def test_every_flag_of_every_command_is_one_that_the_script_has(script: str, tmp_path: Path) -> None:
    known = python(ROOT / script, "--help", cwd=tmp_path)
    assert known.returncode == 0, known.stderr
    for command in (command[1:] for command in commands() if command[0] == script):
        own = command[: command.index("--")] if "--" in command else command
        for flag in (word.partition("=")[0] for word in own if word.startswith("--")):
            if not flag.startswith("--model.network."):  # the network's own
                assert re.search(rf"{re.escape(flag)}\b", known.stdout), (flag, command)


@pytest.mark.slow
def test_the_defaults_of_the_flags_are_those_of_the_command_line(tmp_path: Path) -> None:
    printed = python(ROOT / "scripts" / "train.py", "--print_config", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    settings = yaml.safe_load(printed.stdout)
    rows = {row[0].strip("`-").split()[0]: row[1].strip("`") for row in table(below("The flags"), "`--")}
    assert {*SHORT_FLAGS, *OWN_FLAGS} <= rows.keys()
    for flag, default in rows.items():
        value = settings
        for key in SHORT_FLAGS[flag][0].split(".") if flag in SHORT_FLAGS else flag.split("."):
            value = value.get("init_args", value)[key]
        if isinstance(value, dict):
            value = value["class_path"].rpartition(".")[2]
        # What Lightning makes of no precision is in its own help.
        assert {"None": "32-true", "False": "off", "1800.0": "1800"}.get(str(value), str(value)) == default, flag


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the tables of a text whose first cells begin so."""
    rows = (line for line in text.splitlines() if line.startswith(f"| {first}"))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("text", [below("Measured"), PAGES["docs/measured.md"]], ids=["README.md", "docs/measured.md"])
def test_the_means_of_three_seeds_are_the_means_of_their_rows(text: str) -> None:
    rows = [[float(re.sub(r"[ s,]", "", cell)) for cell in row[1:]] for row in table(text, "CIFAR-10, seed")]
    rows += [[float(re.sub(r"[ s,]", "", cell)) for cell in row[1:]] for row in table(text, "seed")[:3]]
    means = [[float(re.sub(r"[ s,]", "", cell)) for cell in row[1:]] for row in table(text, "mean of the three")]
    for three, mean in ((rows[:3], means[0]), (rows[3:], means[1])):
        for column, value in enumerate(mean):
            unit = 0.00005 if value < 1 else 0.5
            assert sum(row[column] for row in three) / 3 == pytest.approx(value, abs=unit * 1.01)


def test_its_measured_rows_are_rows_of_the_page_of_all_measurements() -> None:
    rows = [line for line in below("Measured").splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert set(rows) <= set(PAGES["docs/measured.md"].splitlines())


def test_the_sizes_of_networks_and_gradients_are_those_of_the_networks() -> None:
    default = sum(weight.numel() for weight in ConvNet().parameters())
    settings = yaml.safe_load((ROOT / "configs" / "documents.yaml").read_text())["model"]["network"]["init_args"]
    with torch.device("meta"):
        articles = sum(weight.numel() for weight in ConvNet(**settings).parameters())
    on_paper = " ".join(PAGES["docs/measured.md"].split())
    assert f"{4 * default:,} bytes for the default network, {4 * articles:,} for the articles'" in on_paper
    named = {page: text.count(f"{articles:,}") for page, text in PAGES.items() if f"{articles:,}" in text}
    assert named == {"README.md": 1, "docs/by-hand.md": 1, "docs/measured.md": 1}


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
    assert program.count("max_epochs=10") == 1
    program = program.replace("max_epochs=10", "max_epochs=1")  # the others are no different
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

"""The tools around the code agree: CI, pre-commit, CONTRIBUTING.md, the bounds on dependencies, and the pages' links."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest itself needs tomli
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Found by what is in it: scripts/rename.py would give the table the new name too, were it named here.
(PROJECT,) = (table for table in PYPROJECT.values() if "requires-python" in table)
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
PAGES = sorted(page for pattern in ("*.md", "docs/**/*.md", "[!.]*/README.md") for page in ROOT.glob(pattern))


def blocks(name: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code on a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def contributing() -> list[str]:
    """The commands that CONTRIBUTING.md asks for, in its order."""
    return re.split(r" && |\n", blocks("CONTRIBUTING.md")[1][1].strip())


def commands(job: dict) -> list[str]:
    """What a job of the workflow runs."""
    return [step["run"] for step in job["steps"] if "run" in step]


def requirements(*extras: str) -> dict[str, Requirement]:
    """The direct dependencies, and those of some extras, by name, without the project itself."""
    texts = PROJECT["dependencies"] + [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    found = {canonicalize_name(Requirement(text).name): Requirement(text) for text in texts}
    return {name: requirement for name, requirement in found.items() if name != canonicalize_name(PROJECT["name"])}


def supported_pythons() -> list[str]:
    """The versions that requires-python allows, from the oldest to the newest."""
    return [f"3.{minor}" for minor in range(30) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])]


def sections(page: Path) -> set[str]:
    """What a link to a section of a page may say behind #."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def file_links(page: Path) -> Iterator[tuple[str, str]]:
    """The file and the section of each link of a page that leads to a file of the repository."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(r"^\[[^]^][^]]*\]: (\S+)", text, re.MULTILINE)
    for target in targets + re.findall(r'\b(?:src|href)="([^"]+)"', text):
        file, _, section = target.partition("#")
        if file and not re.match(r"\w+:", file):
            yield file, section


def test_the_workflow_runs_the_commands_of_contributing_and_no_others() -> None:
    jobs = [commands(WORKFLOW["jobs"][name]) for name in ("lint", "types", "tests")]
    assert [command for job in jobs for command in job if not command.startswith("pip install ")] == contributing()


def test_ci_run_runs_the_commands_of_contributing() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    readme_command = blocks("README.md")[1][1].strip()  # which it evaluates
    assert f"test=$(readme_command '{readme_command}')" in lines
    assert set(contributing()) - {readme_command.rpartition(" && ")[2]} <= set(lines)


def test_the_hooks_are_the_commands_of_contributing_before_pytest_mending_what_they_can() -> None:
    entries = [hook["entry"] for repository in HOOKS for hook in repository["hooks"]]
    *before_pytest, pytest_ = contributing()
    assert pytest_ == "pytest"
    assert [entry.replace(" --fix", "") for entry in entries] == [text.replace(" --check", "") for text in before_pytest]


def test_the_hooks_use_the_tools_of_the_environment_on_the_whole_repository() -> None:
    assert [repository["repo"] for repository in HOOKS] == ["local"]
    hooks = [(hook["language"], hook["pass_filenames"]) for hook in HOOKS[0]["hooks"]]
    assert set(hooks) == {("system", False)}


def test_the_extra_test_brings_every_tool_of_contributing() -> None:
    assert {command.split()[0] for command in contributing()} <= requirements("test").keys()


def test_mypy_alone_checks_all_of_project_strictly() -> None:
    assert PYPROJECT["tool"]["mypy"]["strict"] is True
    assert PYPROJECT["tool"]["mypy"]["files"] == ["project"]


def test_the_tests_run_on_the_oldest_and_on_the_newest_of_everything() -> None:
    job = WORKFLOW["jobs"]["tests"]
    ends = {entry["python"]: entry["options"] for entry in job["strategy"]["matrix"]["include"]}
    oldest, newest = supported_pythons()[0], supported_pythons()[-1]
    assert ends == {oldest: "-c constraints-oldest.txt", newest: "--upgrade --upgrade-strategy eager"}
    assert commands(job)[0] == 'pip install ${{ matrix.options }} -e ".[test]"'
    assert job["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"


def test_only_the_slow_tests_wait_for_the_week_and_the_one_left_out_is_a_test() -> None:
    events = WORKFLOW[True]  # YAML 1.1 reads the key `on` as true
    assert events.keys() == {"push", "pull_request", "schedule"}
    conditions = {name: job.get("if") for name, job in WORKFLOW["jobs"].items()}
    assert {name: text for name, text in conditions.items() if text} == {"slow": "github.event_name == 'schedule'"}
    command = commands(WORKFLOW["jobs"]["slow"])[-1]
    assert command.startswith("pytest -m slow ")
    ((file, name),) = re.findall(r"--deselect (\S+)::(\w+)", command)  # pytest ignores one that is not there
    assert f"\ndef {name}(" in (ROOT / file).read_text()


def test_the_workflow_may_only_read_and_every_job_ends() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not [name for name, job in WORKFLOW["jobs"].items() if "permissions" in job or "timeout-minutes" not in job]


def test_every_action_is_pinned_to_a_major_version() -> None:
    actions = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    assert len(actions) >= 2 * len(WORKFLOW["jobs"])
    assert [action for action in actions if not re.fullmatch(r"actions/[\w-]+@v\d+", action)] == []


def test_the_oldest_versions_are_exactly_the_lower_bounds() -> None:
    lower = {}
    for name, requirement in requirements("onnx", "test").items():
        (lower[name],) = [Version(bound.version) for bound in requirement.specifier if bound.operator == ">="]
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert {str(pin.specifier)[:2] for pin in pins} == {"=="}
    oldest = {canonicalize_name(pin.name): Version(str(pin.specifier)[2:]) for pin in pins}
    assert len(oldest) == len(pins)
    assert oldest == lower


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "CONTRIBUTING.md"])
def test_the_pythons_that_a_page_names_are_those_that_can_be_installed_on(name: str) -> None:
    claims = re.findall(r"Python (?:版本 )?(3\.\d+) (?:to|到) (3\.\d+)", (ROOT / name).read_text())
    pythons = supported_pythons()
    assert set(claims) == {(pythons[0], pythons[-1])}


def test_ruff_writes_for_the_oldest_python() -> None:
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + supported_pythons()[0].replace(".", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_to_files_lead_somewhere(page: Path) -> None:
    for file, section in file_links(page):
        target = page.parent / file
        assert target.exists(), file
        assert not section or section in sections(target), f"{file}#{section}"


def test_the_tests_that_contributing_names_are_there() -> None:
    tests = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    names = re.findall(r"`(test_\w+)(\.py)?`", (ROOT / "CONTRIBUTING.md").read_text())
    assert names
    for name, suffix in names:
        assert f"{name}{suffix}" in tests if suffix else f"\ndef {name}(" in "".join(tests.values())

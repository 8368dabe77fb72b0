"""Gives a clone's package another name, in every file that names it."""

import keyword
import re
import shutil
import subprocess
import sys
from pathlib import Path

import project
from project.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
OLD = project.__name__
# Where the word is the package, not the English word nor a table of pyproject.toml: in imports and dotted names, as a
# folder, and alone in quotes or backticks.
ROOMS = "|".join(
    sorted({path.stem for path in (ROOT / OLD).iterdir() if path.stem[0] not in "_."} | {"__init__", "__name__"})
)
MENTIONS = re.compile(
    rf"(?<![\w.-])(?:(?<=from ){OLD}(?=\.| import)|(?<=import ){OLD}\b|{OLD}(?=\.(?:{ROOMS})\b)|{OLD}(?=/|\.[\"'])"
    rf"|(?<=[\"'`/]){OLD}(?=[\"'`]|\[))"
)


def rename(name: str) -> list[str]:
    """Rename the package throughout, as one change of the working tree that nothing is committed of.

    Args:
        name: The new name.

    Returns:
        The files that changed, as git names them.

    Raises:
        UsageError: The name cannot be a package's, something else has it, or the tree has changes or no history.
    """
    _check_name(name)
    _check_tree()
    files = _git("ls-files", "-z").split("\0")
    for cache in list((ROOT / OLD).rglob("__pycache__")):  # would be moved, and be in the way of another try
        shutil.rmtree(cache)
    if (ROOT / name).is_dir():  # caches of a rename that was undone
        shutil.rmtree(ROOT / name)
    _git("mv", OLD, name)
    changed = []
    for file in filter(None, files):
        path = ROOT / re.sub(rf"^{OLD}/", f"{name}/", file)
        if path.is_symlink() or not path.is_file():  # a link, a submodule
            continue
        before = path.read_bytes()
        try:
            after = MENTIONS.sub(name, before.decode()).encode()
        except UnicodeDecodeError:  # a picture
            continue
        if after != before:
            path.write_bytes(after)
        if after != before or path != ROOT / file:
            changed.append(str(path.relative_to(ROOT)))
    _sort_imports([file for file in changed if file.endswith(".py")])
    return changed


def _check_name(name: str) -> None:
    hint = "give letters, digits and underscores, as my_project"
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be the name of a package; {hint}")
    if name == OLD:
        raise UsageError(f"{name!r} is its name already")
    there = [path for path in (ROOT / name).rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    if there or (ROOT / name).is_file() or (ROOT / f"{name}.py").exists():
        raise UsageError(f"{name!r} is the name of something else in this clone; choose another")
    if name in sys.stdlib_module_names or _is_installed(name):
        raise UsageError(f"{name!r} is the name of another package, which it would hide; choose another")


def _is_installed(name: str) -> bool:
    from importlib.metadata import packages_distributions

    return name in packages_distributions()


def _check_tree() -> None:
    try:
        inside = Path(_git("rev-parse", "--show-toplevel").strip()).resolve() == ROOT
    except (OSError, subprocess.CalledProcessError):
        inside = False
    if not inside:
        raise UsageError(f"{ROOT} is no git repository, so nothing could be undone: git init && git add -A && git commit")
    if changes := _git("status", "--porcelain").splitlines():
        first = changes[0][3:]
        raise UsageError(f"the tree has changes ({first}{' and others' if changes[1:] else ''}); commit or stash them first")


def _sort_imports(files: list[str]) -> None:
    """Have ruff put the imports of files in the order that the new name asks for, where it is installed."""
    for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        try:
            subprocess.run([sys.executable, "-m", "ruff", *command, *files], cwd=ROOT, check=False, capture_output=True)
        except OSError:
            return


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout

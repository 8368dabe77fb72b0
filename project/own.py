"""Which code is this clone's own: what a flag or a checkpoint may name to be imported, beside torch's networks."""

import importlib.util
from pathlib import Path

from project.errors import UsageError


def lies_in_this_clone(module: str) -> bool:
    """Return whether a module, by its dotted name, is a file of this clone; nothing of it is run to find out.

    A folder without an __init__.py does not count, as logs/, where what others gave may lie.
    """
    top, *below = module.split(".")
    if not top or "__main__" in (top, *below):
        return False
    found = importlib.util.find_spec(top)
    if found is None or found.origin is None:
        return False
    place = Path(found.origin).resolve()
    return place.is_relative_to(Path(__file__).resolve().parents[1]) and "site-packages" not in place.parts


def class_of_this_clone(flag: str, name: str, kind: type) -> type:
    """Return a class of this clone that a flag names.

    Args:
        flag: The flag, without dashes.
        name: The class with its module, as `project.data.npz.NpzSource`.
        kind: What it must be a subclass of.

    Raises:
        UsageError: It lies elsewhere, cannot be imported, or is something else.
    """
    module, _, attribute = name.rpartition(".")
    if not lies_in_this_clone(module):
        raise UsageError(f"--{flag} {name}: {module} is no module of this clone; write it there, beside an __init__.py")
    try:
        found = getattr(__import__(module, fromlist=[attribute]), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--{flag} {name} cannot be imported ({error}); name a class with its module") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise UsageError(f"--{flag} {name} is no {kind.__module__}.{kind.__name__}; make it a subclass")
    return found

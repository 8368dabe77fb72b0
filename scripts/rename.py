"""Give the package of this clone your own name.

    python scripts/rename.py my_project

Renames the folder `project` and every mention of the package: imports, commands, tests, documents. Asks for a tree
without changes first; commits nothing, so that `git diff HEAD` shows what was done, and `git reset --hard` undoes it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the `project` beside this script, whatever is installed

from project.run.exit import exit_codes


def main() -> None:
    """Rename, and say what to type next."""
    from project.errors import UsageError
    from project.run.rename import OLD, rename

    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return
    if len(sys.argv) != 2:
        raise UsageError(f"rename.py takes one name, not {len(sys.argv) - 1}: python scripts/rename.py my_project")
    name = sys.argv[1]
    changed = rename(name)
    print(f"renamed   {OLD} to {name}, in {len(changed)} files")
    print(f"next      pip uninstall -y {OLD}; pip install -e . && git add -A && git commit -m 'Rename {OLD} to {name}'")
    print(f"          runs made before name their network by {OLD}: evaluate those in a clone that still has that name")


if __name__ == "__main__":
    with exit_codes():
        main()

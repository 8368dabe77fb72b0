"""Measure what the README claims about speed: every side in the same run, alternating, medians.

    python scripts/benchmark.py                               all sections but accuracy; more than an hour on two cores
    python scripts/benchmark.py --only step input             some of them
    python scripts/benchmark.py --only accuracy --root data/cifar10-png --seeds 0 1 2
    python scripts/benchmark.py --quick                       whether it all runs, in some minutes; the figures mean little

Sections: step, what the template adds to a training step; input, images per second into the network; scaling, ddp on one
and two processes; communication, what adding up the gradients costs, and the speed that follows from it; memory, whether
processes share the images; start, from the command to the first step; size, what more images and a wider network cost;
recipe, how fast configs/speed.yaml goes; accuracy, the whole of it on real CIFAR-10; and gpu, where there is one.
"""

import argparse
import json
import signal
import sys
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the `project` beside this script, whatever is installed

from benchmarks import sections
from benchmarks.measure import Settings, machine, table


def main() -> None:
    """Parse, measure, print, write."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    names = list(sections.ALL)
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="one short sample of everything")
    parser.add_argument("--repeats", type=int, default=5, help="samples of every side (5)")
    parser.add_argument("--root", type=Path, help="CIFAR-10 as train/<class>/*, test/<class>/*, for accuracy, size and gpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the accuracy section (0 1 2)")
    parser.add_argument("--devices", type=int, default=1, help="processes of the accuracy section (1)")
    parser.add_argument("--json", type=Path, help="where the figures go (logs/benchmark-<time>.json)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of whatever ends the programs it has started
    flags = parser.parse_args()
    if flags.repeats < 1 or flags.devices < 1:
        parser.error("--repeats and --devices must be at least 1")
    if flags.root is not None and not (flags.root / "train").is_dir():
        parser.error(f"--root {flags.root} holds no train/; give the folder that holds train/ and test/")
    chosen = flags.only or [name for name in names if name != "accuracy"]
    if "accuracy" in chosen and flags.root is None:
        parser.error("--only accuracy needs --root, real CIFAR-10 as a folder of images")
    root = flags.root and flags.root.resolve()  # the programs run in the project's folder
    settings = Settings(flags.quick, 1 if flags.quick else flags.repeats, root, flags.seeds, flags.devices)

    file = flags.json or Path(f"logs/benchmark-{datetime.now():%Y%m%d-%H%M%S}.json")
    about = machine()
    asked = {"command": sys.argv[1:], "quick": settings.quick, "repeats": settings.repeats}
    print("  ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    rows = []
    for name in chosen:
        rows += sections.ALL[name](settings)
        file.parent.mkdir(parents=True, exist_ok=True)  # after every section: a long run keeps what it has
        file.write_text(json.dumps({**asked, "machine": about, "rows": [row.as_dict() for row in rows]}, indent=1))
    print(table(rows))
    print(f"saved {file}" + ("; measured with --quick: the figures mean little" if flags.quick else ""))


if __name__ == "__main__":
    main()

"""Run scripts/train.py's commands one after another in one process, to save their start: a JSON list of [folder, flags]."""

import json
import os
import runpy
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "scripts" / "train.py"

if __name__ == "__main__":
    for folder, flags in json.loads(sys.argv[1]):
        os.makedirs(folder)
        os.chdir(folder)
        sys.argv = ["train.py", *flags]
        runpy.run_path(str(TRAIN), run_name="__main__")

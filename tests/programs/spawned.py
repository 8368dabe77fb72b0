"""scripts/train.py with data loader workers that are spawned, as on macOS, instead of forked."""

import multiprocessing
import runpy
from pathlib import Path

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "train.py"), run_name="__main__")

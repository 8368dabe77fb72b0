"""Train the same once for each of several seeds, and say what they come to: mean, standard deviation, and how many.

    python scripts/repeat.py -- --config configs/cifar10.yaml         seeds 0 to 4, in turn; after -- flags of train.py
    python scripts/repeat.py --seeds 10 -- --config configs/cifar10.yaml    five more: what is done is not done again
    python scripts/repeat.py --gpus 0,1 -- --lr 0.1 --name lr01       one run at a time on each of these GPUs
    python scripts/repeat.py --at_once 4 -- --max_epochs 2            four side by side, on the CPU

Each is `train.py --name <name>-seed<S> --seed S --resume`; the figures are in <log_dir>/<name>-seeds.json, written after
every seed. Stopped or killed, the same command goes on where it was. `--help` lists the flags.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the `project` beside this script, whatever is installed

from project.run.exit import exit_codes


def main() -> None:
    """Parse, train each seed, sum up."""
    from project.errors import RunError
    from project.run.repeat import Repeats
    from project.run.repeat_flags import check_places, check_seeds, split_command
    from project.run.use import UseParser

    parser = UseParser("repeat.py [flags] -- [flags of train.py]", "Train the same once for each of several seeds.")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--first_seed", type=int, default=0, help="the first of them; the others follow it")
    parser.add_argument(
        "--at_once", type=int, default=1, help="runs side by side, on the CPU; each has its share of threads"
    )
    parser.add_argument("--gpus", type=str | None, help="numbers of GPUs, as 0,1: one run at a time on each of them")

    own, train_flags = split_command(sys.argv[1:])
    flags = parser.parse_args(own)
    seeds = check_seeds(flags.seeds, flags.first_seed)
    places = check_places(flags.at_once, flags.gpus, train_flags)
    repeats = Repeats(train_flags)
    with repeats.held() as lock:
        repeats.begin(seeds)
        failed = repeats.train(seeds, places, lock)
        print("\n".join(repeats.table()), flush=True)
    if failed:
        raise RunError(f"{len(failed)} of {len(seeds)} seeds failed: {'; '.join(failed)}. The same command tries them again")


if __name__ == "__main__":
    with exit_codes():
        main()

"""The flags of scripts/repeat.py, and what it must know of those that it hands on to train.py."""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import yaml

from project.errors import UsageError
from project.run.flags import OWN_FLAGS, SHORT_FLAGS, flag_of

REFUSED = dict.fromkeys(("seed", "seed_everything"), "say which seeds by --first_seed and --seeds, before --")
REFUSED |= {"resume": "leave it out; every seed goes on where it was"}
REFUSED |= dict.fromkeys(("explain", "help", "print_config"), "leave it out, or give it to train.py itself")


def split_command(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags before `--`, and those after it, which are train.py's.

    Raises:
        UsageError: There is no `--`, or a flag after it that cannot be repeated.
    """
    if "--" not in args and not {"-h", "--help"} & {*args}:
        raise UsageError("-- is missing; give the flags of train.py after it, or none: repeat.py --seeds 5 -- --lr 0.1")
    at = [*args, "--"].index("--")
    own, flags = [*args[:at]], [*args[at + 1 :]]
    for given, remedy in ((flag_of(flag, flags), remedy) for flag, remedy in REFUSED.items()):
        if given:
            raise UsageError(f"{' '.join(given)} after --: {remedy}")
    return own, flags


def check_places(at_once: int, gpus: str | None, flags: Sequence[str]) -> list[list[str]]:
    """Return where runs can be at the same time: of each place the flags that send a run there.

    Raises:
        UsageError: There is no such place, or the flags of train.py name another.
    """
    hardware = ("accelerator", "devices", "strategy", "num_nodes")
    given = {name: " ".join(flag_of(name, flags) or flag_of(SHORT_FLAGS[name][0], flags)) for name in hardware}
    if at_once < 1:
        raise UsageError(f"--at_once {at_once} must be at least 1")
    if gpus is None:
        if at_once > 1 and given["accelerator"] and not given["accelerator"].endswith("cpu"):
            raise UsageError(f"--at_once {at_once} is for the CPU, not {given['accelerator']}; for GPUs give --gpus 0,1")
        return [["--accelerator", "cpu"]] * at_once if at_once > 1 else [[]]
    if at_once > 1:
        raise UsageError(f"--at_once {at_once} is for the CPU; leave it out, for each of --gpus has one run at a time")
    for named in filter(None, given.values()):
        raise UsageError(f"{named} after --: leave it out, for --gpus {gpus} says where the runs are")
    numbers = gpus.split(",")
    if not all(number.isdecimal() for number in numbers) or len({*map(int, numbers)}) < len(numbers):
        raise UsageError(f"--gpus {gpus} must be numbers of GPUs, each once, as 0,1")
    return [["--accelerator", "gpu", "--devices", f"{number},"] for number in numbers]


def check_seeds(count: int, first: int) -> list[int]:
    """Return the seeds.

    Raises:
        UsageError: There are none, or one that train.py would refuse.
    """
    if count < 1:
        raise UsageError(f"--seeds {count} must be at least 1")
    if not 0 <= first <= 2**32 - count:
        raise UsageError(f"--first_seed {first} must be from 0 to {2**32 - count}")
    return [*range(first, first + count)]


def setting_of(name: str, flags: Sequence[str]) -> str:
    """Return what train.py takes for a setting of its own, as `name`: what is said last, be it in a `--config` file."""
    value = str(OWN_FLAGS[name][1])
    for place, arg in enumerate(flags):
        flag, assigned, given = arg.partition("=")
        given = given if assigned else "".join(flags[place + 1 : place + 2])
        if flag == f"--{name}":
            value = given
        elif flag == "--config":
            with contextlib.suppress(OSError, yaml.YAMLError, AttributeError):  # mistakes, which train.py will tell
                value = str(yaml.safe_load(Path(given).read_text()).get(name, value))
    return value


def settings_of(flags: Sequence[str]) -> list[str]:
    """Return each flag with its value, a YAML file with its digest; without where the runs are written."""
    settings: list[str] = []
    for arg in flags:
        if arg.startswith("--") or not settings:
            settings.append(arg.replace("=", " ", 1))
        else:
            settings[-1] += f" {arg}"
        file = Path(settings[-1].partition(" ")[2])
        if file.suffix in (".yaml", ".yml") and file.is_file():
            settings[-1] += f" (SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"
    return [setting for setting in settings if setting.partition(" ")[0] not in ("--name", "--log_dir")]


def difference(before: Sequence[str], now: Sequence[str]) -> str:
    """Say how two lists of settings differ."""
    gone, new = (", ".join(x for x in one if x not in other) for one, other in ((before, now), (now, before)))
    if gone:
        return f"with {gone}, not with {new}" if new else f"with {gone}, which is missing"
    return f"without {new}" if new else "with the same flags in another order"

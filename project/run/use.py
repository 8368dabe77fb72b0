"""What evaluate.py and predict.py share: flags that say where a trained network runs, and a Trainer that only runs it."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy

from project.errors import UsageError
from project.run.callbacks import ProgressBar
from project.run.checks import Hardware, check_hardware
from project.run.cluster import as_launched, check_launched, choose_network, cluster_plugins, launched_from_outside, meeting
from project.run.flags import SHORT_FLAGS, OneLineParser
from project.run.launch import launch
from project.run.notices import Notices
from project.run.signals import stop_signal
from project.run.storage import DurableCheckpointIO


class UseParser(OneLineParser):
    """A parser with the flags that say where a network runs; they never change what comes out.

    Args:
        usage: The command.
        description: What it does.
    """

    def __init__(self, usage: str, description: str, **kwargs: Any) -> None:
        super().__init__(usage=usage, description=description, allow_abbrev=False, exit_on_error=False, **kwargs)

    def add_flags_of(self, kind: type, group: str, names: Sequence[str]) -> None:
        """Add some arguments of a class as flags, `--<group>.<name>`."""
        others = set(signature(kind).parameters) - set(names)
        self.add_class_arguments(kind, group, skip=others)

    def parse_args_with(self, defaults: Mapping[str, Any]) -> Namespace:
        """Parse again, with other defaults; those of no flag are left out."""
        known = self.get_defaults().keys()
        self.set_defaults({name: value for name, value in defaults.items() if name in known})
        return self.parse_args()

    def add_hardware_flags(self) -> None:
        """Add them, as scripts/train.py has them."""
        for flag, default in (("accelerator", "auto"), ("devices", "auto"), ("strategy", "auto"), ("num_nodes", 1)):
            self.add_argument(f"--{flag}", type=type(default), default=default, help=SHORT_FLAGS[flag][1])
        self.add_argument("--precision", type=str | None, help="arithmetic; as the network was trained, if it is not given")
        self.add_argument("--quiet", action="store_true", help="print warnings and errors only")


def start(flags: Namespace) -> tuple[Hardware, Notices]:
    """Check the hardware flags, and start the ranks, where they ask for several; this process then ends with them.

    Raises:
        UsageError: This machine cannot do it.
    """
    notices = Notices()
    notices.install()
    flags.devices, flags.num_nodes = as_launched(flags.devices, flags.num_nodes, flags.strategy)
    if flags.strategy == flags.devices == "auto":
        flags.devices = "1"  # to start a process for every GPU takes longer than most tests
    hardware = check_hardware(flags.accelerator, flags.devices, flags.strategy, flags.num_nodes)
    if hardware.missing:
        raise UsageError(hardware.missing)
    if hardware.family not in ("dp", "ddp", "single_device") or (hardware.world_size > 1 and not hardware.is_launched):
        raise UsageError(f"--strategy {hardware.strategy}: a trained network runs with ddp or dp here; use one of them")
    check_launched(hardware)
    meeting.meet()
    if hardware.num_nodes > 1:
        choose_network()
    if hardware.is_launched and not launched_from_outside():
        sys.exit(launch(len(hardware.devices), hardware.num_nodes, []))
    if flags.quiet:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    return hardware, notices


def make_trainer(flags: Namespace, hardware: Hardware, precision: Any, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return a Trainer for `test` and `predict`, which writes nothing.

    Raises:
        UsageError: Lightning refuses a flag.
    """
    shows = sys.stdout.isatty() and not flags.quiet
    try:
        trainer = Trainer(
            accelerator=flags.accelerator,
            devices=flags.devices,
            strategy=DDPStrategy() if hardware.strategy == "ddp" else flags.strategy,
            num_nodes=flags.num_nodes,
            precision=precision,
            logger=False,
            callbacks=[*callbacks, *([ProgressBar()] if shows else [])],
            plugins=[DurableCheckpointIO(), *cluster_plugins()],
            enable_checkpointing=False,
            enable_progress_bar=shows,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
    except (ValueError, TypeError, MisconfigurationException) as error:
        raise UsageError(
            f"--precision {precision}, or another flag of the hardware: {' '.join(str(error).split())}"
        ) from error
    stop_signal.join(trainer.global_rank, trainer.world_size)
    return trainer


def say(lines: Iterable[str]) -> None:
    """Print lines, whatever is in them, as far as anybody reads: `| head` closes its end when it has seen enough."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_output(flag: str, path: str | None, suffix: str) -> Path | None:
    """Return where a flag says that a file of a kind goes, once it is sure that one can be made there.

    Raises:
        UsageError: It cannot.
    """
    if path is None:
        return None
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():
        what = "a folder" if file.is_dir() else "no file but a device or a pipe, which would be replaced"
        raise UsageError(f"--{flag} {path} is {what}; give the name of a file")
    if file.suffix.lower() != suffix:  # so that it is never a checkpoint, an image, or the file of another flag
        raise UsageError(f"--{flag} {path} must end with {suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--{flag} {path}: its folder cannot be made ({error.strerror}); name another") from error
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"--{flag} {path}: {file.parent} cannot be written; name another folder")
    return file

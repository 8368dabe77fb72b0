"""`--resume`: which run and checkpoint to continue, and whether this command is a continuation of it."""

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from project.errors import UsageError
from project.run.storage import DamagedCheckpoint, read_checkpoint, write_durably

# What a continued run may change: where it runs, what it is called, what it prints. Of the trainer's settings, those that
# decide what is computed are named instead, there being fewer of them.
FREE = {"name", "log_dir", "checkpoint_every", "resume", "explain", "quiet", "config", "compile", "timeout"}
FREE |= {"data.root", "data.num_workers", "data.cache_dir", "data.eval_batch_size"}
FIXED_OF_TRAINER = {
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
}


@dataclass(frozen=True)
class Continuation:
    """What a run goes on from.

    Attributes:
        run: The run directory to go on in; None for a new one.
        checkpoint: The checkpoint; None to begin at the first step.
        step: Optimizer steps done in it.
        epochs: Whole epochs done in it.
        validations: That the run had done by then, but for one that is done again; None if that is not known.
        config: The configuration of the run as YAML; empty if it is not known.
        damaged: What was found and passed over.
    """

    run: Path | None
    checkpoint: Path | None
    step: int = 0
    epochs: int = 0
    validations: int | None = None
    config: str = ""
    damaged: tuple[str, ...] = ()


NEW_RUN = Continuation(None, None)


def from_path(path: Path) -> Continuation:
    """Continue a run directory, in place, or a checkpoint, in a new run directory.

    Raises:
        UsageError: There is none, or it cannot be continued.
    """
    if path.is_dir():
        found = in_directory(path)
        if found.checkpoint is None:
            raise UsageError(f"--resume {path} holds no checkpoint; give a run directory, version_<n>, or a .ckpt file")
        return found
    if not path.exists():
        raise UsageError(
            f"--resume {path} is not there, on {socket.gethostname()}; give a run directory or a .ckpt file, or --resume"
            " alone; several machines need it on a disk that all see, or a copy each"
            if os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1")
            else f"--resume {path} is not there; give a run directory or a .ckpt file, or --resume alone"
        )
    return _continuation(None, path, read_checkpoint(path))


def in_directory(run: Path) -> Continuation:
    """Continue a run from its newest checkpoint that is whole, or from the first step where none was saved.

    Raises:
        UsageError: All are damaged, or one would run code.
    """
    folder = run / "checkpoints"
    damaged: list[str] = []
    whole: list[tuple[bool, int, Path, dict[str, Any]]] = []
    for path in (folder / "last.ckpt", folder / "previous.ckpt", folder / "best.ckpt"):
        if path.name != "last.ckpt" and whole and whole[0][2].name == "last.ckpt":
            break  # nothing is newer
        if path.exists():
            try:
                checkpoint = read_checkpoint(path)
            except DamagedCheckpoint as error:
                damaged.append(str(error))
            else:
                whole.append((not _gradients_pending(checkpoint), checkpoint["global_step"], path, checkpoint))
    if not whole:
        if damaged:
            raise UsageError(
                f"--resume: no checkpoint in {folder} is whole ({len(damaged)} are damaged);"
                " give the path of another, or start a new run without --resume"
            )
        config = run / "config.yaml"
        return Continuation(run, None, config=config.read_text() if config.exists() else "")
    *_, path, checkpoint = max(whole, key=lambda one: one[:2])
    return _continuation(run, path, checkpoint, tuple(f"{text}; continuing from {path}" for text in damaged))


def _continuation(run: Path | None, path: Path, checkpoint: dict[str, Any], damaged: tuple[str, ...] = ()) -> Continuation:
    if (
        not isinstance(checkpoint, dict)
        or not {"state_dict", "optimizer_states", "loops", "global_step"} <= checkpoint.keys()
    ):
        raise UsageError(
            f"--resume {path} is no checkpoint of a training run: it lacks the optimizer's state; it cannot be continued"
        )
    if _gradients_pending(checkpoint):
        raise UsageError(
            f"--resume {path} was saved by a validation between the batches of one step, whose gradients it has not;"
            " give last.ckpt, or the run directory"
        )
    known = checkpoint.get("run", {})
    config, validations = known.get("config", ""), known.get("validations")
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    return Continuation(run, path, checkpoint["global_step"], epochs, validations, config, damaged)


def _gradients_pending(checkpoint: dict[str, Any]) -> bool:
    return bool(checkpoint.get("run", {}).get("gradients_pending"))


def check_same(before: str, now: str, checkpoint: Path, flags: Mapping[str, str]) -> None:
    """Refuse settings that would make another run of it.

    Args:
        before: The checkpoint's configuration, YAML.
        now: This command's.
        checkpoint: Where it lies.
        flags: The short flag of each setting that has one.

    Raises:
        UsageError: A setting differs, named with both values.
    """
    old, new = _flat(yaml.safe_load(before)), _flat(yaml.safe_load(now))
    for setting in [*new, *(name for name in old if name not in new)]:
        room, _, rest = setting.partition(".")
        if setting in FREE or (room == "trainer" and rest not in FIXED_OF_TRAINER):
            continue
        was, is_now = old.get(setting), new.get(setting)
        if setting == "data.source" and is_now == "auto":
            continue  # decided already, and held by the images' digest
        if was != is_now:
            plain = setting.replace(".init_args", "").removesuffix(".class_path")
            raise UsageError(
                f"--{flags.get(plain, plain)} {is_now}: {checkpoint} was trained with {was};"
                " give it the same, or start a new run without --resume"
            )


def base_of(config: str, given: Sequence[str]) -> str:
    """Return a run's configuration, YAML, as what a command line that continues it is added to.

    It lacks what says where to run, which is the command line's to say each time, and lists that the command line appends
    to: the same command appended to them before.
    """
    settings = yaml.safe_load(config)
    appended = [match[1] for arg in given if (match := re.match(r"--([\w.]+)\+(?:=|$)", arg))]
    for name in (*(f"trainer.{name}" for name in ("accelerator", "devices", "strategy", "num_nodes")), "compile", *appended):
        *parents, last = name.split(".")
        part = settings
        for parent in parents:
            part = part.get(parent) or {}
        part.pop(last, None)
    text: str = yaml.safe_dump(settings, sort_keys=False)
    return text


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict) or not settings:
        return {prefix[:-1]: settings}
    return {name: value for key, part in settings.items() for name, value in _flat(part, f"{prefix}{key}.").items()}


def purge(paths: Sequence[Path], step: int, validations: int | None = None) -> None:
    """Take out of a run's TensorBoard files what was written from an optimizer step on, and torn ends.

    Args:
        paths: The files, in the order in which they were written.
        step: The first step to go, counted from 0.
        validations: How many of the run stay. Those after them go, be they of the step before: it may have several.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    seen: Counter[str] = Counter()  # of each figure of a validation
    for path in paths:
        records = list(RawEventFileLoader(str(path)).Load())
        kept = []
        for record in records:
            event = Event.FromString(record)
            tags = [value.tag for value in event.summary.value]
            seen.update(tag for tag in tags if tag.startswith("val/"))
            stale = event.step >= step or any(tag.startswith("_hparams_/") for tag in tags)
            own = [seen[tag] for tag in tags if tag.startswith("val/")]
            if own and validations is not None and event.step == step - 1:
                stale = stale or (seen["val/loss"] or max(own)) > validations  # the loss is the first of each
            if not stale:
                kept.append(record)
        whole = sum(len(record) + 16 for record in records) == os.path.getsize(path)  # length, its checksum, the data's
        if len(kept) < len(records) or not whole:
            write_durably(path, partial(_write_records, kept))


def _write_records(records: list[bytes], file: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    for record in records:
        writer.write(record)

"""Checkpoints on disk: written so that a name always stands for a whole file, read without running code."""

import contextlib
import hashlib
import os
import pickle
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from project.errors import RunError, UsageError
from project.run.exit import NO_SPACE, no_space


class DamagedCheckpoint(UsageError):
    """A checkpoint that cannot be read to its end."""


class DurableCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its final place, flush it to the disk, then rename it; read plain values alone.

    Lightning's own writer stages in $TMPDIR, and moving from there to another file system is a copy that can be cut off.
    """

    previous: Path | None = None  # where the next save puts the file that bore the name before; None for nowhere

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save to a path on disk."""
        # step 14: Lightning calls this on rank 0 alone, with names that have no prefix
        try:
            write_durably(Path(path), lambda file: torch.save(checkpoint, file), self.previous)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise RunError(no_space(error) + ". The checkpoints before it are whole") from error
            raise

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint from a path on disk, whatever `weights_only` says, into main memory unless told otherwise.

        All ranks call it together; where a machine has a disk of its own, without the file, it is rank 0's that is read.
        """
        with _from_rank_0(Path(path)) as here:
            return read_checkpoint(here, "cpu" if map_location is None else map_location)


@contextmanager
def _from_rank_0(path: Path) -> Iterator[Path]:
    """Yield the path of a file, or of a copy of rank 0's where this machine has none, or that of another run."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        yield path
        return
    there: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(there, fingerprint(path))
    first = distributed.get_rank() == 0
    if not there[0] or all(one == there[0] for one in there):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        if first:  # what is only tested needs no optimizer, which is most of it; what is continued lies on a shared disk
            torch.save({**read_checkpoint(path), "optimizer_states": []}, copy)
        _send(copy, there[distributed.get_rank()] != there[0])
        yield copy if there[distributed.get_rank()] != there[0] else path


def _send(path: Path, wanted: bool, size: int = 2**26) -> None:
    """Send a file of rank 0's to the ranks that want it, in parts, through all."""
    with contextlib.ExitStack() as stack:
        first = torch.distributed.get_rank() == 0
        file = stack.enter_context(open(path, "rb" if first else "wb")) if first or wanted else None
        while True:
            part = [file.read(size) if first and file else b""]
            torch.distributed.broadcast_object_list(part)
            if not part[0]:
                return
            if wanted and file:
                file.write(part[0])


def fingerprint(path: Path) -> str:
    """Return what tells a checkpoint from every other, by the checksums that it holds; empty where there is none."""
    try:
        with zipfile.ZipFile(path) as records:
            return hashlib.sha256(repr([(one.filename, one.CRC) for one in records.infolist()]).encode()).hexdigest()
    except (OSError, zipfile.BadZipFile):
        return str(path.stat().st_size) if path.is_file() else ""


def write_durably(path: Path, write: Callable[[Any], None], previous: Path | None = None) -> None:
    """Have `write` fill a temporary file in the same folder, flush it to the disk, and give it its name.

    Args:
        path: The file.
        write: Called with the file, open for writing bytes.
        previous: Where to keep what was at `path`; None to replace it.

    Raises:
        OSError: It could not be written; what was at `path` is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            watched = _Watched(file)
            try:
                write(watched)
            except RuntimeError as error:  # torch's writer tells of a full disk in its own way
                if watched.error is None:
                    raise
                raise watched.error from error
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            _give_second_name(path, previous)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


class _Watched:
    """A file that remembers why it could not be written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _give_second_name(path: Path, second: Path) -> None:
    """Name a file twice, so that it is never without a name; rename it where the file system knows no links."""
    link = second.with_name(f".{second.name}.{os.getpid()}.tmp")
    try:
        os.link(path, link)
    except OSError:
        os.replace(path, second)
    else:
        os.replace(link, second)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint that the template, or Lightning, has written: plain values and tensors, no code.

    Args:
        path: A file on disk.
        map_location: As in `torch.load`.
        mmap: Whether to leave the tensors on disk until they are used.

    Raises:
        UsageError: It is not there, or a URL, or no checkpoint, or would run code.
        DamagedCheckpoint: It cannot be read to its end.
    """
    if re.match(r"\w+:/", str(path)):
        raise UsageError(
            f"checkpoint {path} is a URL, and checkpoints are files on disk; download it yourself, if you trust it"
        )
    if not Path(path).is_file():
        raise UsageError(f"checkpoint {path} is not there")
    damaged = f"checkpoint {path} is damaged, or is none ({os.path.getsize(path):,} bytes)"
    try:
        with warnings.catch_warnings():  # about kinds of pickle, none of which is ours
            warnings.simplefilter("ignore")
            checkpoint: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        what = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", str(error))
        with open(path, "rb") as file:
            bare_pickle = file.read(1) == b"\x80"  # which torch.save does not write
        if what or bare_pickle:
            raise UsageError(
                f"checkpoint {path} is refused: it is not plain values but would run code"
                + (f" ({what[1]})" if what else "")
                + "; take one from a source you trust"
            ) from error
        raise DamagedCheckpoint(damaged) from error
    except (
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        zipfile.BadZipFile,
    ) as error:
        raise DamagedCheckpoint(damaged) from error
    if not mmap and (wrong := _wrong_record(path)):
        raise DamagedCheckpoint(f"checkpoint {path} is damaged ({wrong} is not as it was written)")
    if _mentions(checkpoint, "_instantiator"):  # Lightning before 2.6.6 imports and calls what it names
        raise UsageError(
            f"checkpoint {path} is refused: its _instantiator names code to run; take one from a source you trust"
        )
    return checkpoint


def _wrong_record(path: str | os.PathLike[str]) -> str | None:
    """Return the first record whose checksum does not fit; torch writes checksums but does not look at them."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as records:
            return records.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError):
        return "its list of records"


def _mentions(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_mentions(part, key) for part in value.values())
    return isinstance(value, list | tuple) and any(_mentions(part, key) for part in value)

"""A file is whole under its name, or not there."""

from pathlib import Path

import pytest

from project.run.storage import write_durably


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_durably(path, lambda file: file.write(b"old"))

    def fail(file) -> None:  # type: ignore[no-untyped-def]
        file.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_durably(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_until_the_new_file_is_whole_the_old_one_bears_the_name(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "last.ckpt"
    write_durably(path, lambda file: file.write(b"old"))
    seen = []

    def write(file) -> None:  # type: ignore[no-untyped-def]
        file.write(b"new")
        file.flush()
        seen.append(path.read_bytes())

    write_durably(path, write)
    assert seen == [b"old"]
    assert path.read_bytes() == b"new"

"""The cache: whole or not there, made once, remade when its images changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from project.data.cache import ImageCache
from project.data.folder import FolderSource
from project.errors import UsageError
from tests.conftest import ROOT, ImageFolder, clean_environment


def build(root: Path, folder: Path) -> ImageCache:
    cache = ImageCache(FolderSource(root, 32), folder)
    cache.build()
    return cache


def caches(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


def test_the_cache_holds_the_images_and_their_statistics(image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([4, 5], [2, 3])
    manifest, splits = build(root, tmp_path).open()
    pixels = [np.asarray(Image.open(path)) for path in sorted(root.glob("train/*/*.png"))]
    assert np.array_equal(splits["train"].images.numpy(), np.stack(pixels).transpose(0, 3, 1, 2))
    assert splits["train"].labels.tolist() == [0] * 4 + [1] * 5
    assert manifest.mean == pytest.approx((np.stack(pixels) / 255).mean((0, 1, 2)))
    assert manifest.std == pytest.approx((np.stack(pixels) / 255).std((0, 1, 2)))
    assert manifest.num_images == {"train": 9, "test": 5}


def test_a_second_build_reads_nothing(image_folder: ImageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = image_folder([4, 5], [2, 3])
    build(root, tmp_path)
    monkeypatch.setattr(FolderSource, "read", None)
    build(root, tmp_path)


@pytest.mark.parametrize(
    "change", ["content", "same size and time", "removed", "added", "moved to another class", "a class renamed"]
)
def test_the_cache_is_remade_when_its_images_changed(change: str, image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([4, 5], [2, 3])
    before, _ = build(root, tmp_path).open()
    image = root / "train" / "class0" / "0000.png"
    if change == "removed":
        image.unlink()
    elif change == "added":
        (root / "train" / "class0" / "9999.png").write_bytes(image.read_bytes())
    elif change == "a class renamed":
        for split in ("train", "test"):
            (root / split / "class1").rename(root / split / "other")
    elif change == "moved to another class":
        image.rename(root / "train" / "class1" / "9999.png")
    else:
        stat = image.stat()
        if change == "content":
            Image.new("RGB", (32, 32), "red").save(image)
        else:  # swapped with another image, sizes and times put back as they were
            image.write_bytes((root / "train" / "class1" / "0000.png").read_bytes())
            os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after, _ = build(root, tmp_path).open()
    assert (before.digest, before.class_names) != (after.digest, after.class_names)
    assert len(caches(tmp_path)) == 1  # the old one is gone


@pytest.mark.parametrize("name", ["train_images.npy", "test_labels.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_cache_is_remade(name: str, damage: str, image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([4, 5], [2, 3])
    cache = build(root, tmp_path)
    before, _ = cache.open()
    if damage == "missing":
        (cache.path / name).unlink()
    else:
        os.truncate(cache.path / name, (cache.path / name).stat().st_size // 2)
    assert build(root, tmp_path).open()[0] == before


def test_what_a_killed_process_left_is_cleared_away(image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([4, 5], [2, 3])
    cache = ImageCache(FolderSource(root, 32), tmp_path)
    staging = tmp_path / f".{cache.family}.incomplete"
    staging.mkdir()
    (staging / "train_images.npy").write_bytes(b"half")
    cache.build()
    assert caches(tmp_path) == [cache.path]


def test_an_error_leaves_no_cache(image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([4, 5], [2, 3])
    (root / "test" / "class0" / "0000.png").write_bytes(b"not an image")
    with pytest.raises(UsageError):
        build(root, tmp_path)
    assert caches(tmp_path) == []


def test_two_commands_at_the_same_moment_decode_once(image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([300, 300], [20, 20])
    program = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from project.data.datamodule import ImageDataModule
sys.stdin.readline()
data = ImageDataModule("folder", {str(root)!r}, cache_dir={str(tmp_path)!r})
data.prepare_data()
data.setup()
print(json.dumps([data.manifest.digest, int(data.train_batches.labels.sum())]))
"""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert json.loads(results[0][0]) == json.loads(results[1][0])
    assert sum("preparing folder images" in err for _, err in results) == 1
    assert len(caches(tmp_path)) == 1


def test_mapped_images_take_no_memory_of_their_own(image_folder: ImageFolder, tmp_path: Path) -> None:
    _, splits = build(image_folder([4, 5], [2, 3]), tmp_path).open()
    address = splits["train"].images.data_ptr()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "train_images.npy" in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    assert any(start <= address < end for start, end in ranges)
    assert isinstance(splits["train"].images, torch.Tensor)

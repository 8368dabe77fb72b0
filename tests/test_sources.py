"""Every source ends as the same arrays, and says in one line what is wrong with its files."""

import hashlib
import http.server
import io
import os
import pickle
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from project.data import sources
from project.data.datamodule import ImageDataModule
from project.data.folder import FolderSource, read_image
from project.data.sources import Cifar10Source
from project.data.synthetic import SyntheticSource
from project.errors import UsageError
from tests.conftest import ImageFolder


def decode(source: object, split: str) -> tuple[np.ndarray, np.ndarray]:
    count = source.num_images()[split]
    images = np.empty((count, 3, source.image_size, source.image_size), np.uint8)
    labels = np.empty(count, np.int64)
    source.read(split, images, labels, lambda done: None)
    return images, labels


# ---- files of any kind

GREY = np.linspace(0, 255, 64).reshape(8, 8)
COLOUR = np.stack([GREY, GREY[::-1], GREY.T], axis=2).round().astype(np.uint8)


def save(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "LA", "CMYK", "1", "I;16", "I", "F"])
def test_an_image_of_any_mode_is_read_in_colour_and_full_range(mode: str, tmp_path: Path) -> None:
    if mode == "I;16":
        image = Image.fromarray((GREY * 257).astype(np.uint16))
    elif mode == "I":
        image = Image.fromarray((GREY * 257).astype(np.int32))
    elif mode == "F":
        image = Image.fromarray((GREY / 255).astype(np.float32))
    else:
        image = Image.fromarray(COLOUR).convert(mode)
    pixels = read_image(save(image, tmp_path / ("x.tiff" if mode in ("CMYK", "F", "I") else "x.png")), 8)
    assert pixels.shape == (3, 8, 8)
    if mode in ("I;16", "I", "F"):
        assert abs(pixels.astype(float) - GREY).max() <= 1
    elif mode in ("RGB", "RGBA"):
        assert np.array_equal(pixels, COLOUR.transpose(2, 0, 1))
    else:
        assert pixels.max() > 180
        assert pixels.min() < 80


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert read_image(save(image, tmp_path / "x.png"), 8).min() == 255


def test_a_photo_taken_sideways_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    upright = read_image(save(Image.fromarray(COLOUR), tmp_path / "x.png", exif=exif), 8)
    assert np.array_equal(upright, np.rot90(COLOUR, -1).transpose(2, 0, 1))


def test_another_size_is_scaled_to_cover_and_cropped_at_the_centre(tmp_path: Path) -> None:
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    assert read_image(save(Image.fromarray(wide), tmp_path / "x.png"), 10)[:, 2:8, 2:8].min() == 255


# ---- folders


def test_a_folder_gives_its_images_and_labels(image_folder: ImageFolder) -> None:
    source = FolderSource(image_folder([3, 2], [1, 1], [1, 0]), 32)
    assert source.class_names() == ["class0", "class1"]
    assert source.num_images() == {"train": 5, "val": 1, "test": 2}
    images, labels = decode(source, "train")
    assert labels.tolist() == [0, 0, 0, 1, 1]
    expected = np.asarray(Image.open(source.root / "train" / "class1" / "0001.png")).transpose(2, 0, 1)
    assert np.array_equal(images[4], expected)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda root: root.rename(root.with_suffix(".gone")), "does not exist"),
        (lambda root: [path.unlink() for path in root.glob("train/*/*")], "no images in"),
        (lambda root: (root / "train/class1").rename(root / "elsewhere"), "has 1 class folders"),
        (lambda root: (root / "train").rename(root / "Training"), "has no folder train/, but Training/, test/, which"),
        (lambda root: (root / "train/empty").mkdir(), "no images in .*train/empty/"),
        (lambda root: (root / "test/other").mkdir(), "'other', which train/ has not"),
        (lambda root: (root / "train/class0/0000.png").write_bytes(b"not an image"), "0000.png cannot be read"),
        (
            lambda root: (root / "train/class0/0000.png").write_bytes((root / "train/class0/0001.png").read_bytes()[:900]),
            "0000.png cannot be read",
        ),
    ],
)
def test_a_folder_that_cannot_work_is_one_line(spoil, says: str, image_folder: ImageFolder, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root = image_folder([3, 3], [1, 1])
    spoil(root)
    with pytest.raises(UsageError, match=says) as error:
        ImageDataModule("folder", str(root), cache_dir=str(tmp_path)).prepare_data()
    assert "\n" not in str(error.value)
    assert str(root) in str(error.value)


@pytest.fixture
def flat_folder(image_folder: ImageFolder) -> Path:
    """A folder for each of two classes, 20 and 5 images."""
    root = image_folder([20, 5], [])
    for folder in (root / "train").iterdir():
        folder.rename(root / folder.name)
    (root / "train").rmdir()
    shutil.rmtree(root / "val", ignore_errors=True)
    return root


def names_of(source: FolderSource, split: str) -> list[str]:
    return [str(path.relative_to(source.root)) for path, _ in source._list(split)]


def test_a_folder_for_each_class_is_enough_and_every_image_lies_in_one_split(flat_folder: Path, tmp_path: Path) -> None:
    source = FolderSource(flat_folder, 32)
    assert source.class_counts() == {"train": [18, 4], "test": [2, 1]}  # a tenth, an image at least
    train, test = names_of(source, "train"), names_of(source, "test")
    assert sorted(train + test) == sorted(str(path.relative_to(flat_folder)) for path in flat_folder.glob("*/*"))
    data = ImageDataModule("folder", str(flat_folder), batch_size=4, cache_dir=str(tmp_path), val_fraction=0.2)
    data.prepare_data()
    data.setup()
    assert data.num_classes == 2
    assert [len(data.train_positions), len(data.val_positions), len(data.test_positions)] == [17, 5, 3]
    assert data.plan() == (f"folder, {flat_folder}/, test images split off", {"train": 17, "val": 5, "test": 3})


def test_train_without_test_has_a_part_of_itself_for_testing(flat_folder: Path) -> None:
    without = names_of(FolderSource(flat_folder, 32), "test")
    classes = list(flat_folder.iterdir())
    (flat_folder / "train").mkdir()
    for folder in classes:
        folder.rename(flat_folder / "train" / folder.name)
    source = FolderSource(flat_folder, 32)
    assert names_of(source, "test") == [f"train/{name}" for name in without]
    assert names_of(FolderSource(flat_folder, 32, 0.4), "test") != names_of(source, "test")


def test_an_image_that_is_added_moves_at_most_one_other(flat_folder: Path) -> None:
    before = set(names_of(FolderSource(flat_folder, 32), "test"))
    for number in range(100, 103):
        shutil.copy(flat_folder / "class0" / "0000.png", flat_folder / "class0" / f"{number}.png")
        after = set(names_of(FolderSource(flat_folder, 32), "test"))
        assert len(after - before) <= 1
        before = after


def test_the_test_images_are_the_same_for_every_seed(flat_folder: Path, tmp_path: Path) -> None:
    digests = set()
    for seed in (0, 1):
        data = ImageDataModule("folder", str(flat_folder), batch_size=4, cache_dir=str(tmp_path), seed=seed)
        data.prepare_data()
        data.setup()
        digests.add(data.manifest.digest)
    assert len(digests) == 1


def test_a_cache_among_the_classes_is_none(flat_folder: Path) -> None:
    """As in data/, where images may lie beside it."""
    for _ in range(2):
        data = ImageDataModule("folder", str(flat_folder), batch_size=4, cache_dir=str(flat_folder / "cache"))
        data.prepare_data()
        assert data.num_classes == 2


@pytest.mark.parametrize("name", ["valid", "Test", "testing"])
def test_a_split_by_another_name_beside_train_is_not_passed_over(name: str, image_folder: ImageFolder) -> None:
    root = image_folder([3, 3], [])
    (root / name).mkdir()
    with pytest.raises(UsageError, match=f"{name}/ would be passed over; rename it"):
        FolderSource(root, 32)


def test_no_share_for_testing_and_no_test_folder_is_refused(flat_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--data.test_fraction 0.0: .* has no test/"):
        ImageDataModule("folder", str(flat_folder), test_fraction=0.0)


def test_folders_of_images_are_not_taken_for_a_place_to_put_cifar10(flat_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"holds class0/, images of your own: add --data.source folder"):
        ImageDataModule("auto", str(flat_folder))


# ---- generated pictures


def test_synthetic_pictures_are_the_same_every_time() -> None:
    images, labels = decode(SyntheticSource(32), "test")
    again, _ = decode(SyntheticSource(32), "test")
    assert np.array_equal(images, again)
    assert np.bincount(labels).tolist() == [200] * 10
    train, _ = decode(SyntheticSource(32), "train")
    assert not {image.tobytes() for image in images} & {image.tobytes() for image in train}


def test_a_linear_model_fails_on_synthetic_pictures() -> None:
    (x, y), (x_test, y_test) = (
        (torch.from_numpy(images).flatten(1) / 127.5 - 1, torch.from_numpy(labels))
        for images, labels in (decode(SyntheticSource(32), split) for split in ("train", "test"))
    )
    torch.manual_seed(0)
    linear = torch.nn.Linear(3072, 10)
    optimizer = torch.optim.Adam(linear.parameters(), 1e-3)
    best = 0.0
    for _ in range(15):
        for batch in torch.randperm(len(y)).split(128):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(linear(x[batch]), y[batch]).backward()
            optimizer.step()
        best = max(best, (linear(x_test).argmax(1) == y_test).float().mean().item())
    assert 0.1 < best < 0.5


# ---- CIFAR-10, from a real server


def small_cifar10(folder: Path, label_names: list[str]) -> tuple[bytes, list[list[str]], list[list[str]], dict[str, str]]:
    """Make an archive of CIFAR-10's layout with 20 images in each of its six files; return it and its checksums."""
    random = np.random.default_rng(0)
    buffer = io.BytesIO()
    checksums: dict[str, str] = {}
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
        for name in names:
            content: dict[str, object] = {"label_names": label_names}
            if name != "batches.meta":
                content = {"data": random.integers(0, 256, (20, 3072)).astype(np.uint8), "labels": list(range(10)) * 2}
            data = pickle.dumps(content)
            checksums[name] = hashlib.md5(data).hexdigest()
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    files = [[name, checksums[name]] for name in names]
    meta = {"filename": "batches.meta", "key": "label_names", "md5": checksums["batches.meta"]}
    return buffer.getvalue(), files[:5], files[5:6], meta


class Server:
    """An HTTP server on a free port of this machine.

    Attributes:
        body: What it serves.
        length: Bytes of it that it sends before it hangs up; None for all.
        requests: Number of downloads so far.
        seconds: How long it waits before it sends.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.length: int | None = None
        self.requests = 0
        self.seconds = 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                time.sleep(outer.seconds)
                self.wfile.write(outer.body[: outer.length])

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/cifar-10-python.tar.gz"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    archive, train_list, test_list, meta = small_cifar10(tmp_path, [f"name{number}" for number in range(10)])
    server = Server(archive)
    monkeypatch.setattr(CIFAR10, "url", server.url)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", train_list)
    monkeypatch.setattr(CIFAR10, "test_list", test_list)
    monkeypatch.setattr(CIFAR10, "meta", meta)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.server.shutdown()
    server.server.server_close()


def cifar10(tmp_path: Path, source: str = "cifar10") -> ImageDataModule:
    return ImageDataModule(source, str(tmp_path / "data"), 10, cache_dir=str(tmp_path / "cache"))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["cifar10", "auto"])
def test_cifar10_is_downloaded_once_checked_and_read(server: Server, tmp_path: Path, source: str) -> None:
    data = cifar10(tmp_path, source)
    data.prepare_data()
    data.setup()
    server.server.shutdown()
    again = cifar10(tmp_path, source)
    again.prepare_data()
    again.setup()
    assert data.resolved_source == "cifar10"
    assert data.class_names == [f"name{number}" for number in range(10)]
    assert (len(data.train_positions), len(data.val_positions), len(data.test_positions)) == (90, 10, 20)
    expected = CIFAR10(str(tmp_path / "data"), train=False).data.transpose(0, 3, 1, 2)
    assert np.array_equal(again.test_batches.images.numpy(), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_download_that_takes_a_while_is_said_in_one_line(
    quiet: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "SECONDS_BEFORE_A_WORD", 0.1)
    server.seconds = 0.5
    data = cifar10(tmp_path)
    data.quiet = quiet
    data.prepare_data()
    line = f"downloading {server.url} into {tmp_path / 'data'}/\n"
    assert capsys.readouterr().err.count(line) == (0 if quiet else 1)


def test_two_commands_at_the_same_moment_download_once(server: Server, tmp_path: Path) -> None:
    both = [get_context("fork").Process(target=cifar10(tmp_path).prepare_data) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    together, server.requests = server.requests, 0
    cifar10(tmp_path / "alone").prepare_data()
    assert together == server.requests > 0


def test_an_interrupted_download_is_not_taken_for_a_whole_one(server: Server, tmp_path: Path) -> None:
    server.length = len(server.body) // 2
    with pytest.raises(UsageError, match=r"damaged: its MD5 is|cannot be reached"):
        cifar10(tmp_path).prepare_data()
    assert not list((tmp_path / "data").glob("*cifar*incomplete*"))
    assert not (tmp_path / "data" / "cifar-10-python.tar.gz").exists()
    server.length = None
    cifar10(tmp_path).prepare_data()


def test_a_download_killed_half_way_is_cleared_away(server: Server, tmp_path: Path) -> None:
    left = tmp_path / "data" / ".cifar10-incomplete" / "cifar-10-batches-py"
    left.mkdir(parents=True)
    (left / "data_batch_1").write_bytes(b"half")
    data = cifar10(tmp_path)
    data.prepare_data()
    assert not left.exists()


def test_an_archive_put_there_by_hand_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-python.tar.gz").write_bytes(server.body)
    cifar10(tmp_path).prepare_data()
    assert server.requests == 0


def test_a_damaged_archive_is_named_with_both_checksums(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    archive = tmp_path / "data" / "cifar-10-python.tar.gz"
    archive.write_bytes(server.body[:-1])
    found = hashlib.md5(server.body[:-1]).hexdigest()
    with pytest.raises(UsageError) as error:
        cifar10(tmp_path).prepare_data()
    assert all(part in str(error.value) for part in (str(archive), found, CIFAR10.tgz_md5, "delete it"))


def test_a_changed_batch_file_is_refused_unread(server: Server, tmp_path: Path) -> None:
    cifar10(tmp_path).prepare_data()
    marker = tmp_path / "marker"

    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(marker),))

    for name in ("data_batch_3", "batches.meta"):
        file = tmp_path / "data" / "cifar-10-batches-py" / name
        content = file.read_bytes()
        file.write_bytes(pickle.dumps(Malicious()))
        source = Cifar10Source(tmp_path / "data")
        for read in (cifar10(tmp_path).prepare_data, cifar10(tmp_path).plan, cifar10(tmp_path).setup, source.class_names):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            with pytest.raises(UsageError, match=f"{name} is damaged"):
                read()
        file.write_bytes(content)
    assert not marker.exists()


def test_auto_does_not_pass_over_a_damaged_copy(server: Server, tmp_path: Path) -> None:
    cifar10(tmp_path).prepare_data()
    (tmp_path / "data" / "cifar-10-batches-py" / "data_batch_2").unlink()
    with pytest.raises(UsageError, match="data_batch_2 is missing"):
        cifar10(tmp_path, "auto").prepare_data()


def test_a_copy_in_a_folder_that_cannot_be_written_is_used(server: Server, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    cifar10(tmp_path).prepare_data()

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr("project.data.sources.FileLock", refuse)  # root writes everywhere, so the lock stands for it
    again = cifar10(tmp_path)
    again.prepare_data()
    again.setup()
    with pytest.raises(UsageError, match=r"--data.root .* cannot be written"):
        ImageDataModule("cifar10", str(tmp_path / "elsewhere"), cache_dir=str(tmp_path)).prepare_data()


def test_offline_cifar10_says_what_to_do_and_auto_says_what_it_does(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(UsageError, match=r"Put cifar-10-python.tar.gz into .* by hand, or use --data.source synthetic"):
        cifar10(tmp_path).prepare_data()
    data = cifar10(tmp_path, "auto")
    with pytest.warns(UserWarning, match="THIS RUN IS NOT ON CIFAR-10"):
        data.prepare_data()
    data.setup()
    assert data.resolved_source == "synthetic"
    assert "disc" in data.class_names


def test_a_postscript_file_is_refused_and_not_run(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.eps")
    (tmp_path / "picture.eps").rename(tmp_path / "picture.png")
    with pytest.raises(UsageError, match="PostScript is a program"):
        read_image(tmp_path / "picture.png", 8)


@pytest.mark.parametrize("link", ["class0/up", "class0/deeper/up"])
def test_a_link_back_up_brings_no_image_in_twice_or_under_another_class(
    link: str, image_folder: ImageFolder, tmp_path: Path
) -> None:
    root = image_folder([3, 2], [1, 1])
    for split in ("train", "test"):
        place = root / split / link
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(root / split)
        place.with_name("round").symlink_to(place.parent)
    (root / "train" / "class1" / "more").symlink_to(tmp_path)  # one to elsewhere is followed
    save(Image.new("RGB", (4, 4)), tmp_path / "x.png")
    assert FolderSource(root, 32).class_counts() == {"train": [3, 3], "test": [1, 1]}


def test_names_that_are_not_utf_8_are_read_or_refused_in_one_line(image_folder: ImageFolder) -> None:
    root = image_folder([2, 2], [1, 1])
    name = os.fsdecode(b"\xc4\xe3.png")  # in GBK, as unzip leaves what was packed on Windows
    save(Image.new("RGB", (4, 4)), root / "train" / "class0" / name)
    source = FolderSource(root, 32)
    assert source.class_counts()["train"] == [3, 2]
    assert source.fingerprint().isprintable() or "\n" in source.fingerprint()
    (root / "train" / "class1").rename(root / "train" / os.fsdecode(b"\xb9\xb7"))
    with pytest.raises(UsageError, match=r"the class folder b'\\xb9\\xb7' in .* rename it"):
        FolderSource(root, 32)

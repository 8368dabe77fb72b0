"""scripts/predict.py as a person runs it: on whatever lies in their folders, on any number of processes, nothing lost."""

import csv
import io
import json
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

from project.data import files as reading
from project.data.batches import BLANK, EvaluationSampler
from project.data.files import BATCHES_AHEAD, FileBatches, ImageFiles, find_files
from project.data.folder import read_image
from project.data.synthetic import SyntheticSource
from project.errors import RunError, UsageError
from project.run import predict as predicting
from project.run.trained import Trained, load_trained
from scripts.predict import main
from tests.conftest import ROOT, Run, clean_environment, python

SCRIPT = ROOT / "scripts" / "predict.py"
CPU = ["--accelerator", "cpu"]
TWO = [*CPU, "--strategy", "ddp", "--devices", "2"]


def test_images() -> tuple[np.ndarray, np.ndarray, list[str]]:
    source = SyntheticSource(32)
    images, labels = np.empty((2000, 3, 32, 32), np.uint8), np.empty(2000, np.int64)
    source.read("test", images, labels, lambda done: None)
    return images.transpose(0, 2, 3, 1), labels, source.class_names()


test_images.__test__ = False  # type: ignore[attr-defined]


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(file.read_bytes().decode(), newline="")))


# ---- the same figures, whoever counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 2,000 test images of the run as files, in a folder for each class."""
    root = tmp_path_factory.mktemp("counted")
    images, labels, names = test_images()
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (root / "mine" / names[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / "mine" / names[label] / f"{number:04}.png")
    return root


@pytest.mark.slow
def test_counting_its_labels_gives_the_accuracy_of_training_and_of_evaluate_on_one_process_and_on_two(
    folder: Path, run: Run
) -> None:
    flags = ["--csv", "one.csv", "--top", "3"]
    one = python(SCRIPT, run.folder, "mine", *CPU, *flags, cwd=folder)
    assert (one.returncode, one.stdout, one.stderr) == (0, "2,000 images; saved one.csv\n", "")
    rows = rows_of(folder / "one.csv")
    assert [row["file"] for row in rows] == sorted(str(path.relative_to(folder)) for path in folder.glob("mine/*/*"))
    assert list(rows[0]) == ["file", "label", "confidence", "label_2", "confidence_2", "label_3", "confidence_3", "error"]
    right = sum(row["label"] == Path(row["file"]).parent.name for row in rows)
    assert right > 1000
    assert run.summary["test_accuracy"] == pytest.approx(right / 2000, abs=1e-6)
    assert f"tested    accuracy {right / 2000:.4f}," in run.output

    script, there = ROOT / "scripts" / "evaluate.py", ["--data.source", "folder", "--data.root", "mine"]
    evaluated = python(script, run.folder, *CPU, *there, "--json", "figures.json", cwd=folder)
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads((folder / "figures.json").read_text())["test_accuracy"] == pytest.approx(right / 2000, abs=1e-6)

    two = python(SCRIPT, run.folder, "mine", *TWO, "--top", "3", "--csv", "two.csv", cwd=folder)
    assert (two.returncode, two.stdout, two.stderr) == (0, "2,000 images; saved two.csv\n", "")
    assert (folder / "two.csv").read_bytes() == (folder / "one.csv").read_bytes()


@pytest.mark.slow
def test_three_processes_that_share_a_few_batches_give_the_same_too(folder: Path, run: Run) -> None:
    for devices in (1, 3):
        flags = [*CPU, *(["--strategy", "ddp"] if devices > 1 else []), "--devices", devices, "--batch_size", "300"]
        result = python(SCRIPT, run.folder, "mine/ring", "mine/disc", *flags, "--csv", f"{devices}.csv", cwd=folder)
        assert result.returncode == 0, result.stderr
    assert (folder / "3.csv").read_bytes() == (folder / "1.csv").read_bytes()
    assert len(rows_of(folder / "3.csv")) == 400


def test_on_two_ranks_one_image_has_its_label_and_a_missing_one_its_line(run: Run, tmp_path: Path) -> None:
    image(tmp_path / "plus.png")
    result = python(SCRIPT, run.folder, "plus.png", "gone.png", *TWO, cwd=tmp_path)
    assert result.returncode == 1
    table = result.stdout.splitlines()
    assert table[0].split() == ["label", "confidence", "file"]
    assert re.fullmatch(r"\w+ +[01]\.\d{4}  plus\.png", table[1])
    assert len(table) == 2
    words = ["could not read gone.png: No such file or directory", "error: 1 of 2 files could not be read"]
    assert result.stderr.splitlines() == words


# ---- a folder of odd files

PICTURE = next(iter(test_images()[0][4::10]))  # a triangle, which is another one when it lies on its side
PIXELS = Image.fromarray(PICTURE)
GREY = PIXELS.convert("L")
LEVELS = np.asarray(GREY)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def image(path: Path) -> None:
    PIXELS.save(path)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def black_png(width: int, height: int, rows: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = zlib.compress(bytes((width + 7) // 8 + 1) * rows, 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def turned() -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    return {"exif": exif}


def with_wrong_exif() -> bytes:
    data = bytearray(encoded(PIXELS, "JPEG", quality=100, subsampling=0, **turned()))
    start = data.index(b"Exif\0\0") + 6
    data[start : start + 8] = b"nonsense"
    return bytes(data)


def with_wrong_checksum() -> bytes:
    data = bytearray(PNG)
    start = data.index(b"IDAT")
    length = struct.unpack(">I", data[start - 4 : start])[0]
    data[start + 4 + length] ^= 255
    return bytes(data)


def with_wrong_pixels() -> bytes:
    data = bytearray(PNG)
    data[data.index(b"IDAT") + 400] ^= 255
    return bytes(data)


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inside.png", PNG)
    return file.getvalue()


def listen(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name may have 107 letters
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def reads_all() -> bool:
    """Whether this process may read what nobody may, as root does."""
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0)
        return os.access(file.name, os.R_OK)


def forbidden(path: Path) -> None:
    path.write_bytes(PNG)
    path.chmod(0)


SIDEWAYS = PIXELS.transpose(Image.Transpose.ROTATE_90)
PNG, JPEG = encoded(PIXELS, "PNG"), encoded(PIXELS, "JPEG", quality=100, subsampling=0)
OTHER = Image.new("RGB", (32, 32), "blue")
CLEAR = Image.merge("RGBA", [*PIXELS.split(), Image.new("L", (32, 32), 0)])


@dataclass
class Kind:
    """A file.

    Attributes:
        name: Where it lies.
        makes: Its bytes, or what makes it.
        same: What its probabilities must be those of; None for those of read_image alone.
        within: The largest difference from them.
    """

    name: str
    makes: bytes | Callable[[Path], Any]
    same: Image.Image | None = None
    within: float = 1e-4


LABELLED = [
    Kind("plain.png", PNG, PIXELS),
    Kind("UPPER.PNG", PNG, PIXELS),
    Kind("png named.jpg", PNG, PIXELS),
    Kind("png named.txt", PNG, PIXELS),
    Kind("no suffix", PNG, PIXELS),
    Kind("new\nline.png", PNG, PIXELS),
    Kind('comma, and "quotes".png', PNG, PIXELS),
    Kind("it's; $HOME `x` \\ *?.png", PNG, PIXELS),
    Kind("\x1b[31mred\x07.png", PNG, PIXELS),
    Kind("emoji 😀 日本語 é.png", PNG, PIXELS),
    Kind("not utf-8 \udcff\udce9.png", PNG, PIXELS),
    Kind("-dash.png", PNG, PIXELS),
    Kind("n" * 240 + ".png", PNG, PIXELS),
    Kind("folder.jpg/inside/deep.png", PNG, PIXELS),
    Kind("Thumbs/by link.png", lambda path: path.symlink_to("../plain.png"), PIXELS),
    Kind("linked folder/plain.png", lambda path: None, PIXELS),
    *([Kind("forbidden.png", forbidden, PIXELS)] if reads_all() else []),
    Kind("wrong checksum.png", with_wrong_checksum(), PIXELS),
    Kind("rubbish behind.png", PNG + b"rubbish" * 99, PIXELS),
    Kind("lzw.tiff", encoded(PIXELS, "TIFF", compression="tiff_lzw"), PIXELS),
    Kind("pages.tiff", encoded(PIXELS, "TIFF", save_all=True, append_images=[OTHER, OTHER]), PIXELS),
    Kind("animated.png", encoded(PIXELS, "PNG", save_all=True, append_images=[OTHER]), PIXELS),
    Kind("animated.webp", encoded(PIXELS, "WEBP", save_all=True, append_images=[OTHER], lossless=True), PIXELS),
    Kind("lossless.webp", encoded(PIXELS, "WEBP", lossless=True), PIXELS),
    Kind("x.bmp", encoded(PIXELS, "BMP"), PIXELS),
    Kind("x.ppm", encoded(PIXELS, "PPM"), PIXELS),
    Kind("x.pcx", encoded(PIXELS, "PCX"), PIXELS),
    Kind("x.tga", encoded(PIXELS, "TGA"), PIXELS),
    Kind("x.ico", encoded(PIXELS, "ICO", sizes=[(32, 32)]), PIXELS),
    Kind("x.sgi", encoded(PIXELS, "SGI"), PIXELS),
    Kind("x.dds", encoded(PIXELS, "DDS"), PIXELS),
    Kind("opaque.png", encoded(PIXELS.convert("RGBA"), "PNG"), PIXELS),
    Kind("turned by exif.png", encoded(SIDEWAYS, "PNG", **turned()), PIXELS),
    Kind("turned by exif.jpg", encoded(SIDEWAYS, "JPEG", quality=100, subsampling=0, **turned()), PIXELS, 0.05),
    Kind("nonsense exif.jpg", with_wrong_exif(), PIXELS, 0.05),
    Kind("progressive.jpeg", encoded(PIXELS, "JPEG", quality=100, subsampling=0, progressive=True), PIXELS, 0.05),
    Kind("cmyk.jpg", encoded(PIXELS.convert("CMYK"), "JPEG", quality=100, subsampling=0), PIXELS, 0.05),
    Kind("lab.tiff", encoded(PIXELS.convert("LAB"), "TIFF"), PIXELS, 0.1),
    Kind("palette.png", encoded(PIXELS.quantize(256), "PNG"), PIXELS, 0.1),
    Kind("animated.gif", encoded(PIXELS, "GIF", save_all=True, append_images=[OTHER, OTHER]), PIXELS, 0.1),
    Kind("transparent.png", encoded(CLEAR, "PNG"), Image.new("RGB", (32, 32), "white")),
    Kind("transparent.webp", encoded(CLEAR, "WEBP", lossless=True, exact=True), Image.new("RGB", (32, 32), "white")),
    Kind(
        "clear colour.png", encoded(Image.new("P", (32, 32), 0), "PNG", transparency=0), Image.new("RGB", (32, 32), "white")
    ),
    Kind("clear by rgb.png", encoded(OTHER, "PNG", transparency=(0, 0, 255)), Image.new("RGB", (32, 32), "white")),
    Kind("grey.png", encoded(GREY, "PNG"), GREY),
    Kind("grey with alpha.png", encoded(GREY.convert("LA"), "PNG"), GREY),
    Kind("grey 16 bits.png", encoded(Image.fromarray(LEVELS.astype(np.uint16) * 257), "PNG"), GREY),
    Kind("grey 16 bits.tiff", encoded(Image.fromarray(LEVELS.astype(np.uint16) * 257), "TIFF"), GREY),
    Kind("grey 32 bits.tiff", encoded(Image.fromarray(LEVELS.astype(np.int32) * 257), "TIFF"), GREY),
    Kind("grey from 0 to 1.tiff", encoded(Image.fromarray((LEVELS / 255).astype(np.float32)), "TIFF"), GREY),
    Kind("1 bit.png", encoded(PIXELS.convert("1"), "PNG"), PIXELS.convert("1")),
    Kind("no number.tiff", encoded(Image.fromarray(np.full((9, 9), np.nan, np.float32)), "TIFF"), Image.new("RGB", (9, 9))),
    Kind("pixel.png", encoded(Image.new("RGB", (1, 1), "blue"), "PNG"), OTHER),
    Kind("strip.png", encoded(Image.new("RGB", (1, 3000), "blue"), "PNG"), OTHER),
    Kind("wide strip.gif", encoded(Image.new("RGB", (3000, 1), "blue"), "GIF"), OTHER),
    Kind("large.jpg", encoded(OTHER.resize((5000, 4000)), "JPEG", quality=100, subsampling=0), OTHER, 0.05),
    Kind("panorama.png", black_png(16000, 6000, 6000), Image.new("RGB", (32, 32))),  # 96 megapixels
    *([Kind("photo.avif", encoded(PIXELS, "AVIF", quality=100))] if ".avif" in Image.registered_extensions() else []),
    *([Kind("x.jp2", encoded(PIXELS, "JPEG2000"), PIXELS)] if features.check("jpg_2000") else []),
]
NOT_AN_IMAGE = "not an image, or of a kind that Pillow does not know"
UNREAD: list[tuple[str, bytes | Callable[[Path], Any], str]] = [
    ("cut.jpg", JPEG[:900], "cannot be decoded .image file is truncated"),
    ("cut.png", PNG[:900], "cannot be decoded .image file is truncated"),
    ("cut.tiff", encoded(PIXELS, "TIFF")[:900], "cannot be decoded"),
    ("cut.bmp", encoded(PIXELS, "BMP")[:900], "cannot be decoded .image file is truncated"),
    ("cut.gif", encoded(PIXELS, "GIF")[:900], "cannot be decoded"),
    ("cut.webp", encoded(PIXELS, "WEBP")[:200], "cannot be decoded"),
    ("header only.jpg", JPEG[:20], NOT_AN_IMAGE),
    ("wrong pixels.png", with_wrong_pixels(), "cannot be decoded"),
    ("bomb.png", black_png(60000, 60000, 10), "cannot be decoded .Image size .3600000000 pixels. exceeds"),
    ("empty.png", b"", "empty"),
    ("zeros.png", bytes(4096), NOT_AN_IMAGE),
    ("text.jpg", b"not an image\n" * 50, NOT_AN_IMAGE),
    ("page.png", b"<!DOCTYPE html><html><body>404</body></html>", NOT_AN_IMAGE),
    ("starts like a ppm.txt", b"P6 is a name, and no picture", "cannot be decoded"),
    ("labels.csv", b"file,label\nplain.png,plus\n", NOT_AN_IMAGE),
    ("photos.zip", zipped(), NOT_AN_IMAGE),
    ("Thumbs.db", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504), NOT_AN_IMAGE),
    ("drawing.svg", b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', NOT_AN_IMAGE),
    ("document.pdf", encoded(PIXELS, "PDF"), NOT_AN_IMAGE),
    ("film.mpg", b"\0\0\1\xb3\x14\0\xf0" + bytes(99), "cannot be decoded"),
    ("data.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "cannot be decoded"),
    ("phone.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", NOT_AN_IMAGE),
    ("pipe.png", os.mkfifo, "not a file but a pipe, a socket or a device"),
    ("socket.png", listen, "not a file but a pipe, a socket or a device"),
    ("device.png", lambda path: path.symlink_to("/dev/zero"), "not a file but a pipe, a socket or a device"),
    ("dangling.png", lambda path: path.symlink_to("nowhere.png"), "a link to what is not there"),
    *([] if reads_all() else [("forbidden.png", forbidden, "Permission denied")]),
    ("own link.png", lambda path: path.symlink_to("own link.png"), "Too many levels of symbolic links"),
]
HIDDEN = [".DS_Store", ".hidden.png", ".git/", "__MACOSX/._plain.png"]


@pytest.fixture(scope="module")
def trained(run: Run) -> Trained:
    return load_trained(run.folder / "checkpoints" / "best.ckpt")


def probabilities(trained: Trained, pixels: np.ndarray) -> dict[str, float]:
    mean, std = (torch.tensor(figures)[:, None, None] for figures in (trained.mean, trained.std))
    with torch.inference_mode():
        shares = trained.network(((torch.tensor(pixels) / 255 - mean) / std)[None]).softmax(dim=1)[0]
    return dict(zip(trained.class_names, shares.tolist(), strict=True))


@dataclass
class Odd:
    root: Path  # holds `odd`
    result: subprocess.CompletedProcess[str]
    told: dict[str, Any]
    predictions: dict[str, dict[str, Any]]
    reasons: dict[str, str]


@pytest.fixture(scope="module")
def odd(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Odd:
    """All kinds in one folder, with nothing else of the run than its best checkpoint; the terminal knows ASCII alone."""
    root = tmp_path_factory.mktemp("odd")
    shutil.copy(run.folder / "checkpoints" / "best.ckpt", root)
    made = [(kind.name, kind.makes) for kind in LABELLED] + [(name, makes) for name, makes, _ in UNREAD]
    for name, makes in [*made, *((name, PNG) for name in HIDDEN)]:
        path = root / "odd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        elif isinstance(makes, bytes):
            path.write_bytes(makes)
        elif not name.startswith("linked folder/"):
            makes(path)
    (root / "odd" / "linked folder").rmdir()
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "plain.png").write_bytes(PNG)
    (root / "odd" / "linked folder").symlink_to(root / "elsewhere")
    (root / "odd" / "Thumbs" / "circle").symlink_to("..")
    flags = ["--top", "10", "--json", "all.json", "--csv", "all.csv"]
    result = python(SCRIPT, "best.ckpt", "odd", *CPU, *flags, cwd=root, PYTHONIOENCODING="ascii:strict", LC_ALL="C.UTF-8")
    told = json.loads((root / "all.json").read_text())
    predictions = {each["file"]: each for each in told["predictions"]}
    return Odd(root, result, told, predictions, {each["file"]: each["reason"] for each in told["unread"]})


@pytest.mark.parametrize("kind", LABELLED, ids=lambda kind: ascii(kind.name)[1:-1])
def test_what_is_an_image_has_the_label_of_its_picture(kind: Kind, odd: Odd, trained: Trained) -> None:
    file = os.path.join("odd", kind.name)
    found = odd.predictions[file]
    shares = {each["label"]: each["confidence"] for each in found["top"]}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert (found["label"], found["confidence"]) == next(iter(shares.items()))
    with warnings.catch_warnings():  # of Pillow
        warnings.simplefilter("ignore")
        assert shares == pytest.approx(probabilities(trained, read_image(odd.root / file, 32)), abs=1e-4)
    if kind.same is not None:
        pixels = np.asarray(kind.same.convert("RGB").resize((32, 32))).transpose(2, 0, 1)
        assert shares == pytest.approx(probabilities(trained, pixels), abs=kind.within)


def test_the_picture_on_its_side_would_have_been_something_else(trained: Trained) -> None:
    upright, sideways = (probabilities(trained, np.asarray(each).transpose(2, 0, 1)) for each in (PIXELS, SIDEWAYS))
    assert max(abs(upright[name] - sideways[name]) for name in upright) > 0.2


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, _, words in UNREAD])
def test_what_is_none_is_named_with_the_reason(name: str, words: str, odd: Odd) -> None:
    assert re.match(words, odd.reasons[f"odd/{name}"])


def test_nothing_is_lost_and_nothing_else_is_there(odd: Odd) -> None:
    assert len(LABELLED) + len(UNREAD) >= 80
    assert odd.predictions.keys() == {f"odd/{kind.name}" for kind in LABELLED}
    assert odd.reasons.keys() == {f"odd/{name}" for name, *_ in UNREAD}
    assert sorted(odd.told["hidden"]) == sorted(f"odd/{name.rstrip('/')}" for name in HIDDEN)
    assert odd.told["class_names"] == SyntheticSource.classes
    assert odd.told["checkpoint"] == "best.ckpt"


def test_the_csv_has_a_row_for_each_file_and_leads_back_to_it(odd: Odd) -> None:
    rows = rows_of(odd.root / "all.csv")
    back = [re.sub(r"\\udc([89a-f].)", lambda found: chr(0xDC00 + int(found[1], 16)), row["file"]) for row in rows]
    assert all(os.path.lexists(odd.root / file) for file in back)
    assert sorted(back) == sorted([*odd.predictions, *odd.reasons])
    for file, row in zip(back, rows, strict=True):
        assert row["error"] == odd.reasons.get(file, "")
        assert row["label"] == odd.predictions.get(file, {"label": ""})["label"]
        if not row["error"]:
            assert float(row["confidence"]) == odd.predictions[file]["confidence"]


def test_the_terminal_gets_a_line_for_each_of_the_first_and_the_numbers(odd: Odd) -> None:
    saved = f"{len(LABELLED)} images, {len(UNREAD)} could not be read; saved all.csv and all.json\n"
    assert (odd.result.returncode, odd.result.stdout) == (1, saved)
    hidden, *unread, more, last = odd.result.stderr.splitlines()
    assert hidden.startswith("left out, being hidden: odd/.DS_Store, odd/.git, odd/.hidden.png, odd/__MACOSX/._plain.png")
    assert len(unread) == 20
    assert all(re.match(r"could not read odd/[^:]+: \w", line) for line in unread)
    assert more == f"... and {len(UNREAD) - 20} more; --json lists them all"
    assert last == f"error: {len(UNREAD)} of {len(UNREAD) + len(LABELLED)} files could not be read"


# ---- in this process


@pytest.fixture
def predict(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[list[str], list[str], str]]]:
    """Run the script in this process, in an empty folder; return the lines it prints, and its error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[list[str], list[str], str]:
        monkeypatch.setattr(sys, "argv", ["predict.py", str(run.folder), *map(str, arguments), *CPU])
        error = ""
        with warnings.catch_warnings():
            try:
                main()
            except (UsageError, RunError) as raised:
                error = f"{type(raised).__name__}: {raised}"
        out, err = capfd.readouterr()
        return out.splitlines(), err.splitlines(), error

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", sys.stdout)  # restored at the end
        yield call


def test_the_table_names_the_likeliest_classes(predict: Any, trained: Trained, tmp_path: Path) -> None:
    image(tmp_path / "a\tb.png")
    (tmp_path / "a").mkdir()
    OTHER.save(tmp_path / "a" / "c.jpg")
    out, err, error = predict("--top", "2", "a\tb.png", "a", "a")
    assert (err, error) == ([], "")
    best = sorted(probabilities(trained, PICTURE.transpose(2, 0, 1)).items(), key=lambda each: -each[1])[:2]
    assert out[0].split() == ["label", "confidence", "label", "confidence", "file"]
    assert out[1] == "".join(f"{name:<8}  {share:10.4f}  " for name, share in best) + r"a\tb.png"
    assert [line.split()[-1] for line in out[2:]] == ["a/c.jpg", "a/c.jpg"]
    assert out[2] == out[3]


def test_where_nothing_can_be_read_it_says_so(predict: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".x.png").write_bytes(PNG)
    out, err, error = predict("empty", "hidden", "gone.png", "")
    assert out == []
    assert err == [
        "left out, being hidden: hidden/.x.png",
        "could not read empty: a folder with no files to label",
        "could not read hidden: a folder with no files to label",
        "could not read gone.png: No such file or directory",
        "could not read : No such file or directory",
    ]
    assert error == "RunError: 4 of 4 files could not be read"


def test_quiet_leaves_the_errors(predict: Any, tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    (tmp_path / ".b.png").write_bytes(PNG)
    out, err, error = predict(".", "gone.png", "--quiet", "--csv", "new/a.csv")
    sys.stdout.close()  # the one that --quiet has put there
    assert (out, err) == ([], ["could not read gone.png: No such file or directory"])
    assert error == "RunError: 1 of 2 files could not be read"
    assert [row["error"] for row in rows_of(tmp_path / "new" / "a.csv")] == ["", "No such file or directory"]


def test_a_hidden_file_that_is_named_is_meant(predict: Any, tmp_path: Path) -> None:
    (tmp_path / ".x.png").write_bytes(PNG)
    assert predict(".x.png")[0][1].endswith("  .x.png")


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_where_there_is_no_bar_a_line_now_and_then_says_how_far_it_is(
    seconds: float, predict: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "SECONDS_BETWEEN_LINES", seconds)
    image(tmp_path / "a.png")
    _, err, _ = predict(*["a.png"] * 4, "--batch_size", "1")
    assert err == ([] if seconds else [f"{share}% of 4 files" for share in (25, 50, 75, 100)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "IMAGES is missing"),
        (["a.png", "--top", "0"], "--top 0 must be from 1 to 10, the number of classes"),
        (["a.png", "--top", "11"], "--top 11 must be from 1 to 10, the number of classes"),
        (["a.png", "--batch_size", "0"], "--batch_size 0 must be at least 1"),
        (["a.png", "--csv", "."], "--csv . is a folder"),
        (["a.png", "--jsn", "a.json"], "--jsn is not a flag; did you mean --json?"),
    ],
)
def test_a_mistake_is_told(arguments: list[str], words: str, predict: Any) -> None:
    out, _, error = predict(*arguments)
    assert out == []
    assert error.startswith(f"UsageError: {words}")


def test_an_image_for_which_the_network_has_no_number_is_no_prediction(tmp_path: Path) -> None:
    data = ImageFiles([], 32, [0.5] * 3, [0.25] * 3, 4)
    data.files, data.unread = ["a", "b", "c"], [(2, "empty")]
    found = predicting.Predictions(data, ["x", "y"], 1)
    trainer: Any = SimpleNamespace(world_size=1, is_global_zero=True, progress_bar_callback=None)
    shares = torch.tensor([[torch.nan, torch.nan], [0.25, 0.75], [0.5, 0.5], [0.5, 0.5]])
    module: Any = None
    found.on_predict_batch_end(trainer, module, shares, (None, torch.tensor([0, 1, BLANK, BLANK])), 0)
    found.on_predict_end(trainer, module)
    nan = "the network's output for it is not a number"
    assert list(found) == [("a", [], nan), ("b", [("y", 0.75)], ""), ("c", [], "empty")]
    json.loads(found.as_json(Path("x.ckpt")), parse_constant=pytest.fail)


# ---- finding and reading


def test_folders_are_walked_in_order_and_not_in_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2", "b/10", "b/a/x", "a/z", "a/.x", "a/.y/z", "c"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(PNG)
    Path("b", "a", "up").symlink_to("../..")  # out of the folder that is given, and back into it
    Path("a", "b").symlink_to("../b")
    files, hidden = find_files(["c", "b", "gone", "a/z", "c"])
    assert files == ["c", "b/10", "b/2", "b/a/up/a/z", "b/a/up/c", "b/a/x", "gone", "a/z", "c"]
    assert hidden == ["b/a/up/a/.x", "b/a/up/a/.y"]
    Path("b", "a", "up").unlink()
    assert find_files(["a", "a/.y"])[0] == ["a/b/10", "a/b/2", "a/b/a/x", "a/z", "a/.y/z"]


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_none(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", list_none)
    assert find_files([str(tmp_path)]) == ([str(tmp_path)], [])
    assert reading.image_or_reason(str(tmp_path), 32) == "Permission denied"


def test_no_more_than_some_batches_wait_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def read(path: str, size: int) -> np.ndarray | str:
        begun.append(path)
        return "unlucky" if path == "7" else np.full((3, size, size), int(path), np.uint8)

    monkeypatch.setattr(reading, "image_or_reason", read)
    data = ImageFiles([], 2, [0.5] * 3, [0.25] * 3, 5)
    data.files = [str(number) for number in range(101)]
    batches = FileBatches(data, EvaluationSampler(data.files, torch.arange(101), 5), threads=2)  # type: ignore[arg-type]
    assert len(batches) == 21
    seen = []
    for number, (images, positions) in enumerate(batches):
        time.sleep(0.01)  # for threads that would go on
        assert len(begun) <= (number + 1 + BATCHES_AHEAD) * 5
        assert images.shape == (5, 3, 2, 2)
        assert images[:, 0, 0, 0].tolist() == positions.clamp(min=0).tolist()
        seen += positions.tolist()
    assert seen == [*range(7), BLANK, *range(8, 101), *[BLANK] * 4]
    assert data.unread == [(7, "unlucky")]


@pytest.mark.parametrize("error", [struct.error("short"), IndexError(), MemoryError(), zlib.error("bad"), OSError("odd")])
def test_whatever_pillow_raises_is_a_reason(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Image.Image:
        raise error

    image(tmp_path / "x.png")
    monkeypatch.setattr(Image, "open", fail)
    words = str(error) or type(error).__name__
    with pytest.raises(UsageError, match=rf"x\.png cannot be read as an image \({words}\); mend it"):
        read_image(tmp_path / "x.png", 32)
    assert reading.image_or_reason(str(tmp_path / "x.png"), 32) == f"cannot be decoded ({words})"


# ---- a shell and a terminal


@pytest.mark.slow
def test_head_may_close_its_end(folder: Path, run: Run) -> None:
    command = f"{sys.executable} {SCRIPT} {run.folder} mine mine mine --accelerator cpu | head -n 3"
    environment = clean_environment()
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("images", ["mine/ring", "mine/ring/0001.png"])
def test_on_a_terminal_a_bar_counts_the_batches_if_there_are_several(images: str, folder: Path, run: Run) -> None:
    leader, terminal = pty.openpty()
    command = [sys.executable, SCRIPT, run.folder, images, "--batch_size", "50", "--csv", "bar.csv", *CPU]
    environment = {**clean_environment(), "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(list(map(str, command)), stdout=terminal, stderr=terminal, env=environment, cwd=folder)
    os.close(terminal)
    output = b""
    try:
        while True:
            try:
                output += os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
        assert process.wait(timeout=120) == 0, output[-2000:]
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode()).replace("\r", "\n")
    assert text.rstrip().endswith("saved bar.csv")
    assert ("4/4" in text) == (images == "mine/ring")
    assert ("Predicting" in text) == (images == "mine/ring")

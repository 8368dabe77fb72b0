"""scripts/evaluate.py as a person runs it: the figures of training again, on any number of processes, on other images."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from project.data.synthetic import SyntheticSource
from project.errors import UsageError
from project.run.trained import checkpoint_in, load_trained
from project.run.use import say
from scripts.evaluate import main
from tests.conftest import NARROW, ROOT, ImageFolder, Run, python, run_of, train

CPU = ["--accelerator", "cpu"]


def evaluate(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python(ROOT / "scripts" / "evaluate.py", *arguments, cwd=cwd)


def evaluated(*arguments: object, cwd: Path) -> tuple[str, dict[str, Any]]:
    result = evaluate(*arguments, *CPU, "--json", "figures.json", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((cwd / "figures.json").read_text())


@pytest.fixture(scope="module")
def first(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """The run's best checkpoint, evaluated on one process, with a picture."""
    cwd = tmp_path_factory.mktemp("evaluated")
    return *evaluated(run.folder, "--plot", "new/confusion.png", cwd=cwd), cwd


def test_its_figures_are_those_that_training_printed_and_saved(run: Run, first: tuple[str, dict[str, Any], Path]) -> None:
    printed, figures, _ = first
    told = re.search(r"^tested +accuracy ([\d.]+), loss ([\d.]+), on ([\d,]+) images", run.output, re.MULTILINE)
    assert told is not None
    assert f"accuracy    {told[1]}\n" in printed
    assert f"loss        {told[2]}\n" in printed
    assert f"synthetic: {told[3]} test images, each counted once\n" in printed
    for name in ("test_accuracy", "test_loss", "num_test_images"):
        assert figures[name] == run.summary[name], name


def test_head_may_close_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        say(["accuracy"] * 10_000)
        say(["one more, which goes nowhere"])


def test_the_classes_add_up(first: tuple[str, dict[str, Any], Path]) -> None:
    printed, figures, _ = first
    confusion = np.array(figures["confusion"])
    assert confusion.sum() == figures["num_test_images"] == 2000
    assert confusion.trace() / 2000 == pytest.approx(figures["test_accuracy"], abs=1e-6)
    for number, (name, images) in enumerate(figures["images_by_class"].items()):
        assert confusion[number].sum() == images == 200
        accuracy = confusion[number, number] / images
        assert figures["accuracy_by_class"][name] == pytest.approx(accuracy, abs=1e-6)
        assert re.search(rf"^{name} +{accuracy:.4f} +{images}$", printed, re.MULTILINE)
    assert list(figures["images_by_class"])[:2] == ["disc", "ring"]


def test_the_plot_is_a_picture(first: tuple[str, dict[str, Any], Path]) -> None:
    with Image.open(first[2] / "new" / "confusion.png") as picture:
        assert picture.size > (400, 400)


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_give_the_same_figures(
    devices: int, run: Run, first: tuple[str, dict[str, Any], Path], tmp_path: Path
) -> None:
    printed, figures = evaluated(run.folder, "--strategy", "ddp", "--devices", devices, cwd=tmp_path)
    assert figures["world_size"] == devices
    assert printed.partition("saved")[0] == first[0].partition("saved")[0]
    for name in ("test_accuracy", "num_test_images", "confusion", "accuracy_by_class", "images_by_class"):
        assert figures[name] == first[1][name], name
    assert figures["test_loss"] == pytest.approx(first[1]["test_loss"], abs=2e-6)


def class_folders(root: Path, per_class: int, only: slice = slice(None)) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Write the first synthetic test images of each class as files; return the classes' names, images and labels."""
    source = SyntheticSource(32)
    images, labels = np.empty((2000, 3, 32, 32), np.uint8), np.empty(2000, np.int64)
    source.read("test", images, labels, lambda done: None)
    names, kept = source.class_names(), []
    for label, name in list(enumerate(names))[only]:
        (root / name).mkdir(parents=True)
        for position in np.nonzero(labels == label)[0][:per_class]:
            Image.fromarray(images[position].transpose(1, 2, 0)).save(root / name / f"{position:04}.png")
            kept.append(position)
    return names, torch.from_numpy(images[kept]), torch.from_numpy(labels[kept])


def test_on_other_images_pixels_are_scaled_as_in_training_and_some_classes_are_enough(run: Run, tmp_path: Path) -> None:
    names, images, labels = class_folders(tmp_path / "mine" / "test", 20, only=slice(2, 7))
    _, figures = evaluated(run.folder, "--data.source", "folder", "--data.root", "mine", cwd=tmp_path)
    trained = load_trained(run.folder / "checkpoints" / "best.ckpt")
    mean, std = (torch.tensor(figure)[:, None, None] for figure in (trained.mean, trained.std))
    with torch.no_grad():
        right = trained.network((images / 255 - mean) / std).argmax(1) == labels
    assert figures["num_test_images"] == 100
    assert figures["test_accuracy"] == pytest.approx(right.float().mean().item(), abs=1e-6)
    assert figures["images_by_class"] == {name: 20 if 2 <= label < 7 else 0 for label, name in enumerate(names)}
    assert figures["accuracy_by_class"][names[0]] is None


@pytest.mark.slow
def test_where_training_split_its_test_images_off_only_those_are_scored(image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([20, 20], [])
    for folder in (root / "train").iterdir():
        folder.rename(root / folder.name)
    (root / "train").rmdir()
    flags = ["--data.source", "folder", "--data.root", str(root), "--max_epochs", "1", "--batch_size", "4"]
    printed = train(tmp_path, *flags, "--data.cache_dir", "cache").stdout
    assert "folder: 32 training, 4 validation, 4 test images, split off: there is no test/" in printed
    trained = tmp_path / "logs" / "default" / "version_0"
    _, figures = evaluated(trained, cwd=tmp_path)
    assert figures["num_test_images"] == 4
    assert figures["test_accuracy"] == json.loads((trained / "summary.json").read_text())["test_accuracy"]
    _, figures = evaluated(trained, "--data.root", os.path.relpath(root, tmp_path), cwd=tmp_path)
    assert figures["num_test_images"] == 4

    shutil.copytree(root, tmp_path / "copy")  # which may hold what was trained on, or may not
    _, figures = evaluated(trained, "--data.root", "copy", cwd=tmp_path)
    assert figures["num_test_images"] == 40
    assert "has no test/: all its images are taken for test images" in figures["warnings"][0]

    shutil.copy(root / "class0" / "0000.png", root / "class0" / "9999.png")
    assert "some may be images that it was trained on" in evaluated(trained, cwd=tmp_path)[1]["warnings"][0]


@pytest.mark.slow
def test_a_folder_of_class_folders_needs_no_test_folder(run: Run, tmp_path: Path) -> None:
    class_folders(tmp_path / "mine", 2)
    assert evaluated(run.folder, "--data.source", "folder", "--data.root", "mine", cwd=tmp_path)[1]["num_test_images"] == 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "CKPT is missing"),
        (["nothing.ckpt"], "nothing.ckpt is not there; give a .ckpt file, or a run directory"),
        (["{run}", "--devics", "2"], "--devics is not a flag; did you mean --devices?"),
        (["{run}", "--devices", "none"], "--devices none: on the CPU this is the number of processes"),
        (["{run}", "--plot", "a.jpg"], "--plot a.jpg must end with .png"),
        (["{run}", "--json", "{run}/checkpoints/best.ckpt"], "best.ckpt must end with .json"),
        (
            ["{run}", "--data.root", "others"],
            "--data.root others: synthetic images lie in no folder; add --data.source folder",
        ),
        (["{run}", "--json", "/dev/null"], "--json /dev/null is no file but a device or a pipe"),
        (["{run}", "--json", "."], "--json . is a folder; give the name of a file"),
        (["{run}", "--json", "/proc/none/a.json"], "--json /proc/none/a.json: its folder cannot be made"),
        (["{run}", "--data.source", "folder", "--data.root", "none"], "--data.root none does not exist"),
        (
            ["{run}", "--data.source", "folder", "--data.root", "others"],
            "'aardvark', which is none of disc, ring",
        ),
        (["{run}", "--precision", "17"], "--precision 17"),
        (["{run}", "--strategy", "fsdp"], "--strategy fsdp: a trained network runs with ddp or dp here"),
        (["damaged.ckpt"], "checkpoint damaged.ckpt is damaged"),
        (["foreign.ckpt"], "foreign.ckpt does not say what its network and images are"),
    ],
)
def test_a_mistake_is_told(
    arguments: list[str], words: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others" / "test" / "aardvark").mkdir(parents=True)
    best = run.folder / "checkpoints" / "best.ckpt"
    (tmp_path / "damaged.ckpt").write_bytes(best.read_bytes()[:-5000])
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    given = [argument.format(run=run.folder) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *given, *([] if "--accelerator" in given else CPU)])
    with warnings.catch_warnings(), pytest.raises(UsageError, match=re.escape(words)) as told:
        main()
    assert "\n" not in str(told.value)


def test_images_of_other_classes_are_refused(run: Run, tmp_path: Path) -> None:
    changed = torch.load(run.folder / "checkpoints" / "best.ckpt", weights_only=True)
    changed["ImageDataModule"]["class_names"] = [f"other {n}" for n in range(10)]
    torch.save(changed, tmp_path / "other.ckpt")
    result = evaluate("other.ckpt", *CPU, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    *_, told = result.stderr.splitlines()  # the line before it says that images are decoded
    assert told.startswith("error: --data.source synthetic has the classes disc, ring")
    assert "the checkpoint knows other 0, other 1" in told
    assert "Traceback" not in result.stderr


# ---- from one device to another


def test_a_checkpoint_of_a_gpu_that_is_not_here_is_read_onto_the_cpu(run: Run, first: Any, tmp_path: Path) -> None:
    """Its tensors say that they lay on cuda:0, which torch.load without a place for them refuses."""
    best, moved = run.folder / "checkpoints" / "best.ckpt", tmp_path / "gpu.ckpt"
    with zipfile.ZipFile(best) as source, zipfile.ZipFile(moved, "w", zipfile.ZIP_STORED) as target:
        for record in source.infolist():
            data = source.read(record)
            if record.filename.endswith("/data.pkl"):
                place, elsewhere = (b"X" + len(name).to_bytes(4, "little") + name for name in (b"cpu", b"cuda:0"))
                assert place in data
                data = data.replace(place, elsewhere)
            target.writestr(record.filename, data)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(moved, weights_only=True)
    _, figures = evaluated("gpu.ckpt", cwd=tmp_path)
    assert figures["confusion"] == first[1]["confusion"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cpu_and_gpu_evaluate_each_others_checkpoints(run: Run, first: Any, cache: list[str], tmp_path: Path) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "0"}
    on_gpu = ["--accelerator", "gpu", "--devices", "1"]
    script = ROOT / "scripts" / "evaluate.py"
    result = python(script, run.folder, *on_gpu, "--json", "gpu.json", cwd=tmp_path, **visible)
    assert result.returncode == 0, result.stderr
    there = json.loads((tmp_path / "gpu.json").read_text())
    assert there["accelerator"] == "gpu"
    assert there["test_loss"] == pytest.approx(first[1]["test_loss"], abs=1e-3)
    train(tmp_path, *on_gpu, *cache, *NARROW, "--data.source", "synthetic", "--max_epochs", "1", **visible)
    trained = run_of(tmp_path, result)
    _, back = evaluated(trained.folder, cwd=tmp_path)
    assert back["test_loss"] == pytest.approx(trained.summary["test_loss"], abs=1e-3)


# ---- the network of a checkpoint


def test_a_run_directory_stands_for_its_best_checkpoint_and_else_its_last(run: Run, tmp_path: Path) -> None:
    assert checkpoint_in(str(run.folder)) == run.folder / "checkpoints" / "best.ckpt"
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(run.folder / "checkpoints" / "last.ckpt", tmp_path / "checkpoints")
    assert checkpoint_in(str(tmp_path)) == tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint_in(str(tmp_path / ".."))


def test_the_network_is_built_anew_with_its_weights_and_what_belongs_to_it(run: Run) -> None:
    trained = load_trained(run.folder / "checkpoints" / "last.ckpt")
    saved = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)
    weights = {name.removeprefix("network."): value for name, value in saved["state_dict"].items()}
    assert trained.network.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in trained.network.state_dict().items())
    assert not trained.network.training
    assert (trained.network_class, trained.source) == ("project.model.networks.ConvNet", "synthetic")
    assert trained.network_arguments["num_classes"] == len(trained.class_names) == 10
    assert trained.optimizer_steps == 168
    assert trained.mean == saved["ImageDataModule"]["mean"]


MOBILE = "torchvision.models.MobileNetV2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"class_path": "project.model.networks.Gone"}, "cannot be imported"),
        ({"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "ran"]}}, "is not taken from a checkpoint"),
        ({"class_path": "project.model.networks.ConvNet", "init_args": {"hidden": 7}}, "do not fit"),
        ({"class_path": "venv.__main__.x"}, "is not taken from a checkpoint"),  # to import it would make a folder
        ({"class_path": "project.run.trained.load_trained"}, "is no network"),
        ({"class_path": "torch.nn.Flatten", "init_args": {}}, "do not fit"),  # torch.nn is ours, but not these weights'
        ({"class_path": "logs.theirs.evil.Net"}, "is not taken from a checkpoint"),
        ({"class_path": MOBILE, "init_args": {"norm_layer": "this.d"}}, "this.d, an argument of its network, is not taken"),
        ({"class_path": MOBILE, "init_args": {"norm_layer": {"class_path": "this.Foo"}}}, "this.Foo, an argument of its"),
    ],
)
def test_a_network_that_cannot_be_built_is_named(
    change: dict[str, Any], words: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "logs" / "theirs").mkdir(parents=True)
    (tmp_path / "logs" / "theirs" / "evil.py").write_text("open('ran', 'w')")
    changed = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)
    settings = yaml.safe_load(changed["run"]["config"])
    settings["model"]["network"] |= change
    changed["run"]["config"] = yaml.safe_dump(settings)
    torch.save(changed, "changed.ckpt")
    with pytest.raises(UsageError, match=words):
        load_trained(Path("changed.ckpt"))
    assert not Path("ran").exists()
    assert "this" not in sys.modules

"""scripts/export.py: what it writes is what the checkpoint computes, and needs neither Lightning nor this project."""

import importlib.util
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from project.data.datamodule import ImageDataModule
from project.errors import RunError, UsageError
from project.model.networks import ConvNet
from project.model.speednet import SpeedNet
from project.run import export as exporting
from project.run.export import FORMATS, destinations, export, largest_difference
from project.run.trained import Trained, load_trained
from tests.conftest import ROOT, clean_environment, python

SCRIPT = ROOT / "scripts" / "export.py"
TORCH_2_10 = "ignore:The given buffer is not writable"  # what that version warns of when it loads a program
README = (ROOT / "README.md").read_text()
NAMES = {to: f"best{suffix}" for to, (suffix, _) in FORMATS.items()}

# Programs of somebody who has an export, and torch or onnxruntime, and nothing of ours but the network's own class.
LOAD = {
    "weights": """
import json, torch
from pathlib import Path
from project.model.networks import ConvNet

about = json.loads(Path("best.weights.pth.json").read_text())
network = ConvNet(**about["network_arguments"]).eval()
network.load_state_dict(torch.load("best.weights.pth", weights_only=True))
mean, std = (255 * torch.tensor(about[name]).view(3, 1, 1) for name in ("mean", "std"))

@torch.inference_mode()
def classify(images):
    return network((torch.from_numpy(images) - mean) / std).softmax(dim=1).numpy()
""",
    "torch": """
import json, torch

extra_files = {"metadata.json": ""}
program = torch.export.load("best.pt2", extra_files=extra_files).module()
about = json.loads(extra_files["metadata.json"])

@torch.inference_mode()
def classify(images):
    return program(torch.from_numpy(images)).numpy()
""",
    "onnx": """
import json, onnxruntime

session = onnxruntime.InferenceSession("best.onnx")
about = json.loads(session.get_modelmeta().custom_metadata_map["metadata.json"])

def classify(images):
    return session.run(["probabilities"], {"images": images})[0]
""",
}
CLASSIFY = """
import sys
import numpy as np

images = np.load("images.npy")
np.save("all.npy", classify(images))
np.save("parts.npy", np.concatenate([classify(part) for part in (images[:1], images[1:8], images[8:])]))
print(json.dumps({"about": about, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def exports(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the best checkpoint of a run, and all three exports of it."""
    run = tmp_path_factory.mktemp("exports")
    (run / "checkpoints").mkdir()
    shutil.copy(finished_run / "checkpoints" / "best.ckpt", run / "checkpoints")
    result = python(SCRIPT, run, "--to", "weights, torch,onnx")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    reported = re.findall(r"^exported  (\S+): probabilities within (\S+) of", result.stdout, re.MULTILINE)
    assert [path for path, _ in reported] == [str(run / "checkpoints" / name) for name in NAMES.values()]
    assert all(float(difference) <= 1e-5 for _, difference in reported)
    assert len(result.stdout.splitlines()) == 6
    return run / "checkpoints"


@pytest.fixture(scope="module")
def trained(exports: Path) -> Trained:
    return load_trained(exports / "best.ckpt")


@pytest.fixture(scope="module")
def test_images(finished_run: Path) -> tuple[Tensor, Tensor]:
    """100 test images of the run, uint8, and what the network is given of them."""
    data = ImageDataModule("synthetic", cache_dir=str(finished_run.parents[2] / "data" / "cache"))
    data.prepare_data()
    data.setup()
    images = data.test_batches.images[:100].clone()
    return images, data.normalize_images(images)


@pytest.mark.parametrize("to", FORMATS)
def test_without_lightning_or_project_it_agrees_with_the_checkpoint_on_100_test_images(
    to: str, exports: Path, trained: Trained, test_images: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    images, normalized = test_images
    with torch.inference_mode():
        expected = trained.network(normalized).softmax(dim=1).numpy()
    for file in exports.glob(f"{NAMES[to]}*"):
        shutil.copy(file, tmp_path)
    np.save(tmp_path / "images.npy", images.numpy())
    (tmp_path / "load.py").write_text(LOAD[to] + CLASSIFY)
    result = python(
        "-W", "error", "-W", TORCH_2_10, "load.py", cwd=tmp_path, PYTHONPATH=str(ROOT) if to == "weights" else ""
    )
    assert result.returncode == 0, result.stderr
    for name in ("all.npy", "parts.npy"):
        found = np.load(tmp_path / name)
        assert found.dtype == np.float32
        assert found.shape == (100, 10)
        assert np.abs(found - expected).max() <= 1e-5
    assert expected.max(axis=1).std() > 0.01  # the network has an opinion

    told = json.loads(result.stdout)
    for name in ("class_names", "image_size", "mean", "std", "source", "optimizer_steps", "network_class"):
        assert told["about"][name] == getattr(trained, name)
    imported = {name for name in told["modules"] if name.partition(".")[0] in ("project", "lightning", "torch")}
    assert not {"lightning", "lightning.pytorch"} & imported
    ours = {name for name in imported if name.startswith("project")}
    assert {name for name in ours if not name.startswith("project.model")} == (
        {"project", "project.errors", "project.data", "project.data.augment"} if to == "weights" else set()
    )
    assert ("torch" in imported) == (to != "onnx")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_weights_are_plain_tensors_that_load_onto_any_device(device: str, exports: Path, trained: Trained) -> None:
    path = exports / "best.weights.pth"
    weights = torch.load(path, weights_only=True)
    assert {type(value) for value in weights.values()} == {Tensor}
    assert {value.device.type for value in weights.values()} == {"cpu"}
    assert all(value.is_contiguous() for value in weights.values())
    assert weights.keys() == trained.network.state_dict().keys()  # no prefix
    moved = torch.load(path, weights_only=True, map_location=device)
    assert {value.device.type for value in moved.values()} == {device}
    with torch.device(device):
        network = ConvNet(**trained.network_arguments)
    assert str(network.load_state_dict(moved, assign=True)) == "<All keys matched successfully>"


@pytest.mark.parametrize("number", range(3))
def test_the_readmes_programs_name_the_class(
    number: int, exports: Path, trained: Trained, test_images: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    section = README.partition("## Take it away")[2].partition("\n## ")[0]
    read, *programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(programs) == 3
    shutil.copytree(exports, tmp_path, dirs_exist_ok=True)
    images, normalized = test_images
    with torch.inference_mode():
        label = int(trained.network(normalized[7:8]).argmax())
    Image.fromarray(images[7].permute(1, 2, 0).numpy()).save(tmp_path / "photo.png")
    (tmp_path / "own.py").write_text(read + programs[number])
    result = python("-W", "error", "-W", TORCH_2_10, "own.py", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [trained.class_names[label]]


# ---- other networks


def of(network: nn.Module, dtype: torch.dtype = torch.float32) -> Trained:
    """A network as `load_trained` would give it."""
    return Trained(
        path=Path("some.ckpt"),
        network=network.to(dtype, memory_format=torch.channels_last).eval(),
        network_class=f"{type(network).__module__}.{type(network).__name__}",
        network_arguments={},
        class_names=list("abcdefghij"),
        image_size=32,
        mean=[0.4, 0.5, 0.6],
        std=[0.2, 0.25, 0.3],
        source="synthetic",
        optimizer_steps=1,
    )


def narrow(**settings: Any) -> ConvNet:
    torch.manual_seed(0)
    return ConvNet((4, 4, 8, 8, 8, 8), 16, **settings)


@pytest.mark.parametrize("to", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unsure_below", [0.0, 0.5, 1.0])
def test_a_network_that_looks_again_where_it_is_unsure_exports_what_it_computes(
    to: str, unsure_below: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network = SpeedNet((8, 8, 8), unsure_below=unsure_below)
    network.head.weight.data *= 3
    export(of(network), to, tmp_path / "net")
    assert (tmp_path / "net").stat().st_size > 10_000


@pytest.mark.parametrize("to", FORMATS)
def test_a_float64_network_comes_out_within_the_same_bounds(to: str, tmp_path: Path) -> None:
    export(of(narrow(), torch.float64), to, tmp_path / "net")
    if to == "weights":
        assert {value.dtype for value in torch.load(tmp_path / "net", weights_only=True).values()} == {torch.float64}


@pytest.mark.parametrize("to", ["weights", "torch"])
def test_a_bfloat16_network_stays_one(to: str, tmp_path: Path) -> None:
    export(of(narrow(), torch.bfloat16), to, tmp_path / "net")
    if to == "torch":
        with open(tmp_path / "net", "rb") as file:
            program = torch.export.load(file)
        assert {value.dtype for name, value in program.state_dict.items() if "network" in name} == {torch.bfloat16}
        assert program.module()(torch.zeros(3, 3, 32, 32, dtype=torch.uint8)).dtype == torch.float32


class Branching(nn.Module):
    """Does something else for dark images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 10)

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean(dim=(2, 3))
        return self.head(means if means.mean() > 0 else -means)


class Counting(Branching):
    """Works for batches of two alone."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.mean(dim=(2, 3)).view(2, 3))


class NotInOnnx(Branching):
    """Sorts by an operation that ONNX lacks."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.linalg.eigvalsh(images[:, :, :3, :3] @ images[:, :, :3, :3].mT).mean(dim=2))


@pytest.mark.parametrize(
    ("to", "network", "remedy"),
    [
        ("torch", Branching(), "use --to weights"),
        ("onnx", Branching(), "use --to weights"),
        ("torch", Counting(), "use --to weights"),
        ("onnx", NotInOnnx(), "use --to torch"),
        ("onnx", narrow().bfloat16(), "use --to torch"),
    ],
)
def test_what_a_format_cannot_hold_is_said_in_one_line(to: str, network: nn.Module, remedy: str, tmp_path: Path) -> None:
    dtype = next(network.parameters()).dtype
    with pytest.raises(UsageError, match=f"^--to {to}.*{remedy}$") as caught:
        export(of(network, dtype), to, tmp_path / "net")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


# ---- what goes wrong


def test_the_difference_is_that_of_the_probabilities() -> None:
    before, after = of(narrow()), of(narrow())
    assert largest_difference(exporting.Probabilities(after.network, after.mean, after.std), before) == 0
    other = replace(after, mean=[0.4, 0.5, 0.61])
    assert largest_difference(exporting.Probabilities(other.network, other.mean, other.std), before) > 1e-5
    assert np.isnan(largest_difference(lambda images: torch.full((len(images), 10), torch.nan), before))


@pytest.mark.parametrize("difference", [1.1e-5, float("nan")])
def test_an_export_that_differs_from_the_checkpoint_is_not_written(
    difference: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net").write_text("what was there")
    monkeypatch.setattr(exporting, "largest_difference", lambda *_: difference)
    with pytest.raises(RunError, match=r"^--to weights: loaded again.*net is not written$"):
        export(of(narrow()), "weights", tmp_path / "net")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["what was there"]


def test_one_that_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "net.json").mkdir()  # where the metadata should go
    (tmp_path / "net").write_text("what was there")
    with pytest.raises(UsageError, match="net cannot be written"):
        export(of(narrow()), "weights", tmp_path / "net")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net", "net.json"]
    assert (tmp_path / "net").read_text() == "what was there"


def test_without_room_for_the_weights_both_files_stay_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(of(narrow()), "weights", tmp_path / "net.pth")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path, write: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(exporting, "write_durably", full)
    with pytest.raises(OSError, match="No space left"):
        export(of(narrow()), "weights", tmp_path / "net.pth")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_sigterm_leaves_nothing(exports: Path, tmp_path: Path) -> None:
    shutil.copy(exports / "best.ckpt", tmp_path)
    program = f"""
import runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
from project.run import export

def compare(*_):
    print("comparing", flush=True)
    time.sleep(60)

export.largest_difference = compare
sys.argv = ["export.py", "best.ckpt", "--to", "torch"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    how: dict[str, Any] = {"cwd": tmp_path, "env": clean_environment(), "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **how) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "comparing\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 143
        finally:
            process.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--to", "onx"], "--to onx is not one of weights, torch, onnx; did you mean onnx?"),
        (["--to", "weights,,onnx"], "--to '' is not one of weights, torch, onnx"),
        (["--to", "pickle"], "--to pickle is not one of weights, torch, onnx"),
        (["--to", "weights,torch", "--output", "net"], "--output net is one file, and --to weights,torch makes 2; .*"),
        (["--output", "."], r"--output \. is a folder; name a file in it"),
        (["--output", "best.ckpt"], "--output best.ckpt is the checkpoint itself; name another file"),
        (["--output", "best.ckpt/net.pth"], "--output best.ckpt/net.pth: nothing can be written in .*; name a file .*"),
        (["--output", "last.ckpt"], "--output last.ckpt must end with .pth"),
        (["--to", "torch", "--output", "net.pth"], "--output net.pth must end with .pt2"),
        (["--output", "/proc/nothing.pth"], "/proc/nothing.pth cannot be written .*; name a file elsewhere with --output"),
        (["--outptu", "net"], "--outptu is not a flag; did you mean --output?"),
        (["--to"], ".*--to.*expected one argument"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], line: str, exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(exports / "best.ckpt", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["export.py", "best.ckpt", *flags])
    spec = importlib.util.spec_from_file_location("export_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(script)
    with pytest.raises(UsageError, match=f"^{line.replace('?', '[?]') if line.endswith('?') else line}$"):
        script.main()
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


@pytest.mark.parametrize("package", exporting.ONNX_PACKAGES)
def test_without_its_packages_onnx_names_the_command_that_installs_them(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf'^--to onnx needs {package}: pip install -e "\.\[onnx\]"$'):
        destinations("onnx", None, Path("best.ckpt"))
    assert destinations("torch", None, Path("best.ckpt")) == {"torch": Path("best.pt2")}


@pytest.mark.parametrize(
    ("checkpoint", "says"), [("damaged.ckpt", "damaged.ckpt is damaged"), ("missing.ckpt", "missing.ckpt is not there")]
)
def test_a_checkpoint_that_cannot_be_read_ends_it_with_2(checkpoint: str, says: str, exports: Path, tmp_path: Path) -> None:
    whole = (exports / "best.ckpt").read_bytes()
    (tmp_path / "damaged.ckpt").write_bytes(whole[: len(whole) // 2])
    result = python(SCRIPT, checkpoint, "--to", "torch", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(f"error: .*{says}.*\n", result.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.ckpt"]


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_made_on_any_device_it_loads_on_any_other(
    exports: Path, trained: Trained, test_images: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.export.passes import move_to_device_pass

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    images, normalized = test_images
    with torch.inference_mode():
        expected = trained.network(normalized).softmax(dim=1)

        program = move_to_device_pass(torch.export.load(exports / "best.pt2"), "cuda")
        on_gpu = program.module()(images.cuda())
        assert on_gpu.device.type == "cuda"
        assert torch.allclose(on_gpu.cpu(), expected, rtol=0, atol=1e-5)

        network = ConvNet(**trained.network_arguments).cuda()
        network.load_state_dict(torch.load(exports / "best.weights.pth", weights_only=True, map_location="cuda"))
        assert torch.allclose(network(normalized.cuda()).softmax(dim=1).cpu(), expected, rtol=0, atol=1e-5)

    checkpoint = torch.load(exports / "best.ckpt", weights_only=True, map_location="cuda")
    torch.save(checkpoint, tmp_path / "gpu.ckpt")  # as one that a GPU's memory was saved from
    result = python(SCRIPT, "gpu.ckpt", "--to", "weights,torch", cwd=tmp_path)  # which sees no GPU
    assert result.returncode == 0, result.stderr
    again, before = (
        torch.load(path, weights_only=True) for path in (tmp_path / "gpu.weights.pth", exports / "best.weights.pth")
    )
    assert all(torch.equal(again[name], before[name]) for name in again | before)
    back = torch.export.load(io.BytesIO((tmp_path / "gpu.pt2").read_bytes())).module()
    with torch.inference_mode():
        assert torch.allclose(back(images), expected, rtol=0, atol=1e-5)

"""scripts/manual: the hand-written programs run, print what they say, and compute what the template computes."""

import importlib
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.run.exit import QUIET_GLOO
from tests.conftest import NARROW, ROOT, python, train

MANUAL = ROOT / "scripts" / "manual"
SIZE = ["--channels", *"448888", "--hidden", "16"]
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--nproc_per_node=2"]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in, whose decoded images all programs here share."""
    return tmp_path_factory.mktemp("place")


def run(place: Path, *command: object, **env: str) -> subprocess.CompletedProcess[str]:
    result = python(*command, cwd=place, TMPDIR=str(place), **env)  # torchrun leaves a folder there
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def printed_losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+) [\d.]+ ms/step", output)}


def same_weights(by_hand: Path, templates: Path) -> list[str]:
    """Return the files, once every weight in them was found equal to the last bit."""
    names = sorted(path.name for path in by_hand.iterdir())
    assert names == sorted(path.name for path in templates.iterdir())
    for name in names:
        first, second = (torch.load(folder / name, weights_only=True) for folder in (by_hand, templates))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
    return names


@pytest.mark.parametrize(
    ("name", "launcher", "template"),
    [
        ("cpu", [], ["--accelerator", "cpu", "--devices", "1"]),
        pytest.param("dp", [], ["--accelerator", "cpu", "--strategy", "dp"], marks=pytest.mark.slow),
        pytest.param(
            "ddp", TORCHRUN, ["--accelerator", "cpu", "--strategy", "ddp", "--devices", "2"], marks=pytest.mark.slow
        ),
        pytest.param("gpu", [], ["--accelerator", "gpu", "--devices", "1"], marks=[pytest.mark.gpu, NEEDS_GPU]),
        pytest.param("dp", [], ["--accelerator", "gpu", "--strategy", "dp"], marks=[pytest.mark.multi_gpu, NEEDS_TWO]),
        pytest.param(
            "ddp", TORCHRUN, ["--accelerator", "gpu", "--strategy", "ddp"], marks=[pytest.mark.multi_gpu, NEEDS_TWO]
        ),
    ],
)
def test_the_template_ends_with_the_very_weights_of_the_hand_written_program(
    name: str, launcher: list[str], template: list[str], place: Path
) -> None:
    on_gpu = "gpu" in template
    env = {"CUDA_VISIBLE_DEVICES": "0" if name == "gpu" else "0,1"} if on_gpu else {}
    if on_gpu:  # cuDNN may otherwise choose another algorithm each time
        env["PYTHONPATH"] = str(ROOT / "tests" / "programs" / "deterministic")
    command = [*launcher, MANUAL / f"{name}.py", "--source", "synthetic", "--epochs", 2, *SIZE, "--report_every", 1]
    output = run(place, *command, **env).stdout
    flags = ["--config", ROOT / "configs" / "manual.yaml", *NARROW, "--data.source", "synthetic", "--max_epochs", 2]
    train(place, *template, *flags, "--name", name, "--trainer.log_every_n_steps", 1, **env)
    folder = place / "logs" / name / "version_0"

    assert same_weights(place / "logs" / "manual" / name, folder / "weights") == ["epoch_0.pth", "epoch_1.pth"]
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    losses = {event.step + 1: f"{event.value:.7f}" for event in events.Scalars("train/loss")}
    assert printed_losses(output) == losses
    assert list(losses) == list(range(1, 2 * 84 + 1))
    assert len(set(losses.values())) > 100  # it trains
    if name == "dp" and not on_gpu:
        assert output.startswith("0 GPUs: nothing splits, all runs on the CPU")
    figures = re.findall(r"(\w+) accuracy ([\d.]+) on (\d+) images", output)
    validations = [f"{event.value:.4f}" for event in events.Scalars("val/accuracy")]
    tests = [f"{event.value:.4f}" for event in events.Scalars("test/accuracy")]
    assert figures == [("validation", v, "600") for v in validations] + [("test", t, "2000") for t in tests]


@pytest.mark.slow
def test_ddp_runs_under_the_old_launcher_too_and_says_each_process_share(place: Path) -> None:
    launch = ["-m", "torch.distributed.launch", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--nproc_per_node=2"]
    flags = ["--source", "synthetic", "--epochs", 1, *SIZE, "--weights", place / "old"]
    output = run(place, *launch, MANUAL / "ddp.py", *flags).stdout
    assert sorted(output.splitlines()[:2]) == [f"rank {rank} on cpu: 32 of 64 images a step" for rank in (0, 1)]
    assert list(printed_losses(output)) == [10, 20, 30, 40, 50, 60, 70, 80]  # once, by rank 0
    assert (place / "old" / "epoch_0.pth").exists()


@pytest.mark.parametrize(
    ("program", "flags", "says"),
    [
        ("gpu.py", [], "error: gpu.py needs a GPU"),
        ("ddp.py", [], "error: ddp.py needs a launcher: torchrun"),
        ("shapes_ddp.py", [], "error: shapes_ddp.py needs a launcher: torchrun"),
        ("cpu.py", ["--source", "folder", "--root", "nowhere"], "error: --root nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_program_that_cannot_start_says_so_in_one_line(program: str, flags: list[str], says: str, place: Path) -> None:
    result = python(MANUAL / program, *flags, cwd=place)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--epoch", "1"], ["--epochs", "0"], ["--report_every", "0"], ["--batch_size", "-1"]], ids=str
)
def test_a_wrong_flag_is_refused(flags: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MANUAL)
    parser = importlib.import_module("command_line").make_parser("", "weights")
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(flags)
    assert exit.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_ddp_refuses_a_batch_that_does_not_divide(place: Path) -> None:
    result = python(*TORCHRUN, MANUAL / "ddp.py", "--batch_size", 63, cwd=place, TMPDIR=str(place))
    assert result.returncode != 0
    assert result.stderr.count("error: --batch_size 63 must be a multiple of 2") == 1


def test_shapes_dp_says_that_nothing_splits_without_gpus(place: Path) -> None:
    output = run(place, MANUAL / "shapes_dp.py").stdout.splitlines()
    whole = ["In model: input [30, 5] output [30, 2] on cpu", "Outside: input [30, 5] output [30, 2]"]
    assert output == ["0 GPUs: nothing splits", *whole * 3]


@pytest.mark.multi_gpu
@NEEDS_TWO
def test_shapes_dp_splits_30_into_15_and_15(place: Path) -> None:
    output = run(place, MANUAL / "shapes_dp.py", CUDA_VISIBLE_DEVICES="0,1").stdout
    for gpu in (0, 1):
        assert output.count(f"In model: input [15, 5] output [15, 2] on cuda:{gpu}") == 3
    assert output.count("Outside: input [30, 5] output [30, 2]") == 3


def split(program: str) -> list[object]:
    return ["-m", "tests.simulated_devices", MANUAL / program]


def test_shapes_dp_splits_30_into_15_and_15_on_simulated_devices(place: Path) -> None:
    output = run(place, *split("shapes_dp.py"), PYTHONPATH=str(ROOT)).stdout.splitlines()[1:]
    half, whole = "In model: input [15, 5] output [15, 2] on cpu", "Outside: input [30, 5] output [30, 2]"
    assert output == [half, half, whole] * 3


@pytest.mark.slow
def test_dp_split_in_two_ends_with_the_weights_of_cpu(place: Path) -> None:
    flags = ["--source", "synthetic", "--epochs", 1, *SIZE]
    run(place, *split("dp.py"), *flags, "--weights", "split", PYTHONPATH=str(ROOT))
    run(place, MANUAL / "cpu.py", *flags, "--weights", "whole")
    two, one = (torch.load(place / folder / "epoch_0.pth", weights_only=True) for folder in ("split", "whole"))
    assert two.keys() == one.keys()
    assert max((two[name] - one[name]).abs().max().item() for name in one) < 1e-6


def test_shapes_ddp_splits_30_into_15_and_15(place: Path) -> None:
    output = run(place, *TORCHRUN, MANUAL / "shapes_ddp.py").stdout.splitlines()
    if tuple(map(int, version("torch").split(".")[:2])) < QUIET_GLOO:  # whose gloo prints lines of its own, mingled
        output = [line for line in output if line.startswith("rank")]
    each = [
        f"rank {rank} {line}"
        for rank in (0, 1)
        for line in ["In model: input [15, 5] output [15, 2] on cpu", "Outside: input [15, 5] output [15, 2]"] * 3
    ]
    assert sorted(output) == sorted(each)


@pytest.mark.parametrize("path", sorted(MANUAL.glob("*.py")), ids=lambda path: path.name)
def test_a_hand_written_program_reads_top_to_bottom_without_lightning(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 110
    assert not [line for line in lines if re.match(r"\s*(from|import) .*lightning", line)]


def test_the_twelve_mistakes_of_the_articles_are_each_named_where_they_are_corrected() -> None:
    text = "".join(path.read_text() for path in MANUAL.glob("*.py"))
    assert {int(number) for number in re.findall(r"\S.{20,}[ (]mistake (\d+)\)", text)} == set(range(1, 13))

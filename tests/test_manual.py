"""scripts/manual: the hand-written programs run, print what they say, and compute what the template computes."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import NARROW, ROOT, python, train

MANUAL = ROOT / "scripts" / "manual"
SIZE = ["--channels", *"448888", "--hidden", "16"]
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--nproc_per_node=2"]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in, whose decoded images all programs here share."""
    return tmp_path_factory.mktemp("place")


def run(place: Path, *command: object, **env: str) -> subprocess.CompletedProcess[str]:
    result = python(*command, cwd=place, **env)
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
        ("ddp", TORCHRUN, ["--accelerator", "cpu", "--strategy", "ddp", "--devices", "2"]),
        pytest.param("gpu", [], ["--accelerator", "gpu", "--devices", "1"], marks=[pytest.mark.gpu, NEEDS_GPU]),
    ],
)
def test_the_template_ends_with_the_very_weights_of_the_hand_written_program(
    name: str, launcher: list[str], template: list[str], place: Path
) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0"} if name == "gpu" else {}
    command = [*launcher, MANUAL / f"{name}.py", "--source", "synthetic", "--epochs", 2, *SIZE, "--report_every", 1]
    output = run(place, *command, **env).stdout
    flags = ["--config", ROOT / "configs" / "documents.yaml", *NARROW, "--data.source", "synthetic", "--max_epochs", 2]
    train(place, *template, *flags, "--name", name, "--trainer.log_every_n_steps", 1, **env)
    folder = place / "logs" / name / "version_0"

    assert same_weights(place / "logs" / "manual" / name, folder / "weights") == ["epoch_0.pth", "epoch_1.pth"]
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    losses = {event.step + 1: f"{event.value:.7f}" for event in events.Scalars("train/loss")}
    assert printed_losses(output) == losses
    assert list(losses) == list(range(1, 2 * 84 + 1))
    assert len(set(losses.values())) > 100  # it trains
    if name == "dp":
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
    ("program", "says"),
    [
        ("gpu.py", "error: gpu.py needs a GPU"),
        ("ddp.py", "error: ddp.py needs a launcher: torchrun"),
        ("shapes_ddp.py", "error: shapes_ddp.py needs a launcher: torchrun"),
    ],
)
def test_a_program_that_cannot_start_says_so_in_one_line(program: str, says: str, place: Path) -> None:
    result = python(MANUAL / program, cwd=place)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1


def test_ddp_refuses_a_batch_that_does_not_divide(place: Path) -> None:
    result = python(*TORCHRUN, MANUAL / "ddp.py", "--batch_size", 63, cwd=place)
    assert result.returncode != 0
    assert "error: --batch_size 63 must be a multiple of 2" in result.stderr


def test_shapes_dp_says_that_nothing_splits_without_gpus(place: Path) -> None:
    output = run(place, MANUAL / "shapes_dp.py").stdout.splitlines()
    whole = ["In model: input [30, 5] output [30, 2] on cpu", "Outside: input [30, 5] output [30, 2]"]
    assert output == ["0 GPUs: nothing splits", *whole * 3]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_shapes_dp_splits_30_into_15_and_15(place: Path) -> None:
    output = run(place, MANUAL / "shapes_dp.py", CUDA_VISIBLE_DEVICES="0,1").stdout
    for gpu in (0, 1):
        assert output.count(f"In model: input [15, 5] output [15, 2] on cuda:{gpu}") == 3
    assert output.count("Outside: input [30, 5] output [30, 2]") == 3


def test_shapes_ddp_splits_30_into_15_and_15(place: Path) -> None:
    output = run(place, *TORCHRUN, MANUAL / "shapes_ddp.py").stdout.splitlines()
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


def test_the_twelve_mistakes_of_the_articles_are_each_corrected_with_a_word_on_why() -> None:
    text = "".join(path.read_text() for path in MANUAL.glob("*.py"))
    assert {int(number) for number in re.findall(r"\S.{20,}[ (]mistake (\d+)\)", text)} == set(range(1, 13))

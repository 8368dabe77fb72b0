"""`--explain`: what it says is what would happen, and nothing happens."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.data.datamodule import ImageDataModule
from project.errors import UsageError
from project.model.classifier import Classifier
from project.model.networks import ConvNet
from project.run.cli import TrainCLI
from project.run.notices import Notices
from project.run.plan import length, memory
from tests.conftest import NARROW, ROOT, ImageFolder, python, train

TRAIN = ROOT / "scripts" / "train.py"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the references are of a machine without a GPU")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Notices, "install", lambda self: None)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def explain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Explain a command in this process."""
    monkeypatch.setattr("sys.argv", ["scripts/train.py", *flags, "--explain"])
    TrainCLI(Classifier, ImageDataModule).explain()
    return capsys.readouterr().out


def fact(output: str, name: str) -> str:
    return re.findall(rf"^{name}  +(.*)$", output, re.MULTILINE)[0]


# ---- the references: read them, they are what a person sees

REFERENCES = {
    "bare": "",
    "ddp-2": "--strategy ddp --devices 2",
    "dp-3-gpus": "--strategy dp --devices 3 --accelerator gpu",
    "ddp-4-gpus-2-machines": "--strategy ddp --devices 4 --num_nodes 2 --accelerator gpu",
}


def as_reference(output: str) -> str:
    """Leave out what differs from machine to machine."""
    output = re.sub(r"(threads +)\d+", r"\1<n>", output)
    return re.sub(r"\(torch.cuda.is_available\(\) is False.*?\) and", "(...) and", output)


@NO_GPU
@pytest.mark.parametrize("name", REFERENCES)
def test_the_plan_is_the_reviewed_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = REFERENCES[name].split()
    if name == "ddp-2":  # two real processes
        result = python(TRAIN, *flags, "--explain", cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        output = result.stdout.replace(str(TRAIN), "scripts/train.py")
    else:
        output = explain(monkeypatch, capsys, *flags)
    assert as_reference(output) == (ROOT / "tests" / "plans" / f"{name}.txt").read_text()
    assert not list(tmp_path.iterdir())  # nothing was written


class OwnData(LightningDataModule):
    """A data module that says nothing of its images."""

    def __init__(self, batch_size: int = 6) -> None:
        super().__init__()


def test_a_data_module_of_ones_own_is_planned_as_far_as_it_is_known(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["scripts/train.py", "--accelerator", "cpu", "--explain"])
    TrainCLI(Classifier, OwnData).explain()
    output = capsys.readouterr().out
    assert fact(output, "data") == "OwnData"
    assert fact(output, "schedule") == "OneCycle over all optimizer steps"
    assert output.splitlines()[-1] == "Outside: input [6, 3, 32, 32] output [6, 10]"


# ---- what it says is true


def test_dp_shows_each_replicas_part(tmp_path: Path) -> None:
    program = [
        "-m",
        "tests.simulated_devices",
        TRAIN,
        "--accelerator",
        "cpu",
        "--strategy",
        "dp",
        "--devices",
        3,
        "--explain",
    ]
    output = python(*program, cwd=tmp_path, PYTHONPATH=str(ROOT)).stdout
    parts = [f"rank 0 on cpu: In model: input [{n}, 3, 32, 32] output [{n}, 10]" for n in (20, 22, 22)]
    assert output.splitlines()[-4:] == [*parts, "Outside: input [64, 3, 32, 32] output [64, 10]"]


@pytest.mark.slow
def test_the_torchrun_command_does_the_same(tmp_path: Path) -> None:
    few = ["--max_epochs", "1", "--trainer.limit_train_batches", "3", "--data.source", "synthetic", *NARROW]
    flags = ["--accelerator", "cpu", "--strategy", "ddp", "--devices", "2", *few]
    plan = python(TRAIN, *flags, "--explain", cwd=tmp_path).stdout
    command = shlex.split(next(line for line in plan.splitlines() if line.startswith("torchrun --nproc_per_node=2 ")))
    rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]  # no fixed port
    result = python("-m", "torch.distributed.run", *rendezvous, *command[1:], cwd=tmp_path, TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    train(tmp_path, *flags)
    runs = [tmp_path / "logs" / "default" / f"version_{n}" / "checkpoints" / "last.ckpt" for n in (0, 1)]
    launched, started = (torch.load(path, weights_only=True)["state_dict"] for path in runs)
    assert all(torch.equal(launched[name], started[name]) for name in started)


@pytest.mark.parametrize(
    ("source", "flags"),
    [("synthetic", []), ("folder", ["--data.val_fraction", "0.3"]), ("val", []), ("cifar10", ["--data.val_fraction", "0"])],
)
def test_it_counts_the_images_that_would_be_used(
    source: str, flags: list[str], image_folder: ImageFolder, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if source in ("folder", "val"):
        root = image_folder([23, 20, 21], [3, 0, 2], [2, 3, 2] if source == "val" else None)
        flags = [*flags, "--data.root", str(root), "--batch_size", "7"]
        source = "folder"
    all_flags = ["--data.source", source, "--accelerator", "cpu", *NARROW, *flags]
    output = explain(monkeypatch, capsys, *all_flags)
    assert fact(output, "data").startswith(source)
    found = [int(n.replace(",", "")) for n in re.findall(r"(\d[\d,]*) \w+", fact(output, "images"))]
    if source == "cifar10":
        assert found == [50_000, 0, 10_000]
        return
    monkeypatch.setattr("sys.argv", ["train.py", *all_flags])
    data = TrainCLI(Classifier, ImageDataModule).datamodule
    data.prepare_data()
    data.setup()
    assert found == [len(data.train_positions), len(data.val_positions), len(data.test_positions)]
    dropped = re.findall(r"(\d+) images dropped", fact(output, "epoch"))
    assert int(dropped[0]) == found[0] - len(data.train_dataloader()) * data.batch_size


class Nothing(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.linear(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 2},
        {"max_epochs": 2, "accumulate_grad_batches": 3},
        {"max_epochs": 3, "limit_train_batches": 4, "accumulate_grad_batches": 4},
        {"max_epochs": 2, "limit_train_batches": 0.5},
        {"max_epochs": 2, "max_steps": 13},
        {"max_epochs": -1, "max_steps": 13},
        {"max_epochs": 5, "fast_dev_run": True},
        {"max_epochs": 5, "fast_dev_run": 3},
        {"max_epochs": None, "limit_train_batches": 1},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
def test_it_counts_steps_as_lightning_does(settings: dict[str, Any]) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", **settings, **quiet)
    trainer.fit(Nothing(), DataLoader(torch.zeros(10, 1), batch_size=1))
    unset = {"limit_train_batches": None, "max_steps": -1, "accumulate_grad_batches": 1, "fast_dev_run": False}
    _, epochs, steps = length(Namespace(**{**unset, **settings}), 10)
    assert (epochs, steps) == (trainer.current_epoch, trainer.global_step)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_estimates_the_memory_that_a_step_really_takes(optimizer: str, momentum: float) -> None:
    settings = {"momentum": momentum} if optimizer == "SGD" else {}
    network = ConvNet((4, 4, 8, 8, 8, 8), 16)
    network.features[0].weight.requires_grad = False
    make = getattr(torch.optim, optimizer)
    real = make(network.parameters(), lr=0.1, **settings)
    network(torch.zeros(2, 3, 32, 32)).sum().backward()
    real.step()
    planned = [nn.Parameter(p.to("meta"), p.requires_grad) for p in network.parameters()]
    size, untried = memory(planned, make(planned, lr=0.1, **settings))

    def total(tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))

    assert untried == ""
    assert size["weights"] == total(network.parameters())
    assert size["gradients"] == total(p.grad for p in network.parameters())
    assert size["optimizer"] == total(value for state in real.state.values() for value in state.values())


class ReadsNumbers(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        float(self.param_groups[0]["params"][0].sum())


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [(torch.optim.LBFGS, "LBFGS could not be tried: .*closure"), (ReadsNumbers, "ReadsNumbers .*meta")],
)
def test_an_optimizer_that_cannot_be_tried_is_left_out_and_the_reason_shown(optimizer: Any, reason: str) -> None:
    planned = [nn.Parameter(torch.empty(3, device="meta"))]
    size, untried = memory(planned, optimizer(planned))
    assert size == {"weights": 12, "gradients": 12}
    assert re.match(reason, untried)


@NO_GPU
def test_the_plan_shows_why_an_optimizer_was_left_out(monkeypatch: Any, capsys: Any) -> None:
    flags = ["--optimizer", "LBFGS", "--lr_scheduler", "null", "--accelerator", "gpu"]
    memory_line = fact(explain(monkeypatch, capsys, *flags), "memory")
    assert "without activations and optimizer (LBFGS could not be tried: " in memory_line


@NO_GPU
@pytest.mark.parametrize(
    ("flags", "name", "says"),
    [
        (["--precision", "64-true"], "memory", "2.6 MiB weights"),
        (["--precision", "bf16-mixed"], "memory", "1.3 MiB weights"),
        (["--lr_scheduler", "null", "--lr", "0.5"], "optimizer", "SGD, learning rate 0.5"),
        (["--lr_scheduler", "null"], "schedule", "none: a constant rate"),
        (["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "3"], "schedule", "StepLR, advanced once an epoch"),
        (
            ["--lr_scheduler", "OneCycleLR", "--lr_scheduler.max_lr", "1", "--lr_scheduler.total_steps", "9"],
            "schedule",
            "over 9 ",
        ),
        (
            ["--lr_scheduler", "lightning.pytorch.cli.ReduceLROnPlateau", "--lr_scheduler.monitor", "val/loss"],
            "schedule",
            "ReduceLROnPlateau, advanced once an epoch",
        ),
        (["--batch_size", "50"], "epoch", "900 steps, no image dropped"),
        (["--trainer.max_steps", "13"], "run", "1 epoch, 13 optimizer steps"),
        (["--trainer.accumulate_grad_batches", "4"], "run", "1,760 optimizer steps, each of 4 batches, 256 images"),
        (["--precision", "bf16-mixed"], "precision", "bf16-mixed"),
        ([], "devices", "1 GPU: 0; all that the machine has"),
        (["--strategy", "ddp", "--devices", "1"], "process group", "nccl"),
        (["--strategy", "dp", "--devices", "3", "--batch_size", "2"], "batch", "1, 1, 0 on the devices"),
        (["--name", "mine", "--log_dir", "there"], "writes", "there/mine/version_0/"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_settings_show(flags: list[str], name: str, says: str, monkeypatch: Any, capsys: Any) -> None:
    output = explain(monkeypatch, capsys, *flags, "--accelerator", "gpu")
    assert says in fact(output, name)


@NO_GPU
def test_many_machines_have_one_line_and_slurm_too(monkeypatch: Any, capsys: Any) -> None:
    output = explain(monkeypatch, capsys, "--strategy", "ddp", "--devices", "8", "--num_nodes", "8", "--accelerator", "gpu")
    assert "on each of the 8 machines, N from 0:\ntorchrun --nnodes=8 --node_rank=N " in output
    assert "sbatch --nodes=8 --ntasks-per-node=8 --gpus-per-node=8 scripts/train.sbatch --strategy ddp" in output


def test_more_processes_than_the_machine_can_bear_are_not_started(monkeypatch: Any, capsys: Any) -> None:
    output = explain(
        monkeypatch, capsys, "--accelerator", "cpu", "--strategy", "ddp", "--devices", "640", "--batch_size", "640"
    )
    assert "It lacks cores (640 processes wanted" in output
    assert output.endswith("No forward pass, which this machine could not make.\n")


@NO_GPU
def test_a_variant_of_ddp_is_ddp(monkeypatch: Any, capsys: Any) -> None:
    flags = ["--strategy", "ddp_find_unused_parameters_true", "--devices", "2", "--accelerator", "gpu"]
    output = explain(monkeypatch, capsys, *flags)
    assert "steps of scripts/manual/ddp.py" in output
    assert "16 clean up" in output
    assert "torchrun --nproc_per_node=2 scripts/train.py --strategy ddp_find_unused_parameters_true" in output
    assert "not by a launcher" in explain(monkeypatch, capsys, "--strategy", "ddp_spawn", *flags[2:])


@NO_GPU
def test_it_names_the_directory_that_would_come_next(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "logs" / "default" / "version_7").mkdir(parents=True)
    output = explain(monkeypatch, capsys, "--accelerator", "gpu", "--devices", "64")
    assert fact(output, "writes") == "logs/default/version_8/"
    assert "It lacks GPUs (64 wanted, it has none)" in output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch_size", "63", "--devices", "2"], "--batch_size 63"),
        (["--lr", "-1"], "Invalid learning rate"),
        (["--data.source", "synthetic", "--batch_size", "9000"], "--batch_size 9000 is more than the 5400 training images"),
        (["--devices", "0,2"], "--accelerator gpu"),
        (["--max_epochs", "-1"], "--lr_scheduler needs to know the run's length"),
        (["--strategy", "dp", "--trainer.sync_batchnorm", "true"], "--trainer.sync_batchnorm true"),
        (["--strategy", "fsdp"], "not --strategy fsdp"),
        (["--strategy", "dp", "--num_nodes", "2"], "--num_nodes 2: --strategy dp"),
        (["--data.source", "folder", "--data.root", "nowhere"], "--data.root nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_a_mistake_here_too(flags: list[str], says: str, monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        explain(monkeypatch, capsys, "--accelerator", "cpu", *flags)

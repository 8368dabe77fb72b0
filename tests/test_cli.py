"""The command line: short flags, one-line errors with exit code 2, and help that a person can read."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from project.data.datamodule import ImageDataModule
from project.errors import UsageError
from project.model.classifier import Classifier
from project.run.cli import TrainCLI
from project.run.flags import SHORT_FLAGS
from project.run.notices import Notices
from tests.conftest import ROOT, ImageFolder, python

TRAIN = ROOT / "scripts" / "train.py"

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(Notices, "install", lambda self: None)  # it changes how this process warns
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    yield
    assert not (tmp_path / "logs").exists()  # an error, or only building, leaves nothing behind


def cli(*args: str) -> TrainCLI:
    return TrainCLI(Classifier, ImageDataModule, ["--accelerator", "cpu", "--devices", "1", *args])


DDP_CLASS = '{"class_path": "lightning.pytorch.strategies.DDPStrategy"}'  # as in a YAML file
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens on a machine without a GPU")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(
            ["--accelerator", "gpu"], ["--accelerator gpu", "torch.cuda.is_available()", "--accelerator cpu"], marks=NO_GPU
        ),
        pytest.param(
            ["--strategy", DDP_CLASS, "--accelerator", "gpu"],
            ["--accelerator gpu", "torch.cuda.is_available()"],
            marks=NO_GPU,
        ),
        (
            ["--strategy", DDP_CLASS, "--devices", "2", "--batch_size", "63"],
            ["--batch_size 63", "62 or 64"],
        ),
        (["--strategy", DDP_CLASS, "--explain"], ["--explain", "by name"]),
        (["--accelerator", "tpu"], ["--accelerator tpu", "this machine has none"]),
        (["--accelerator", "gpuu"], ["--accelerator gpuu", "did you mean gpu"]),
        (["--accelerator", "cpu", "--devices", "0"], ["--devices 0", "--devices 1"]),
        (["--accelerator", "cpu", "--devices=-1"], ["--devices -1", "--devices 1"]),
        (["--accelerator", "cpu", "--devices", "0,1"], ["--devices 0,1", "--devices 1"]),
        (["--accelerator", "cpu", "--devices", "1.5"], ["--devices 1.5", "--devices 1"]),
        (["--accelerator", "cpu", "--devices", "abc"], ["--devices abc", "--devices 1"]),
        (["--strategy", "dpp"], ["--strategy dpp", "did you mean --strategy ddp"]),
        (["--accelerator", "cpu", "--batch_size", "63", "--devices", "2"], ["--batch_size 63", "62 or 64"]),
        (["--accelerator", "cpu", "--batch_size", "1", "--devices", "2"], ["--batch_size 1", "use 2"]),
        (["--num_nodes", "0"], ["--num_nodes 0"]),
        (["--max_epoch", "1"], ["--max_epoch ", "did you mean --max_epochs"]),
        (["--trainer.max_epoch", "1"], ["--trainer.max_epoch ", "did you mean --trainer.max_epochs"]),
        (["--model.network.hiden", "1"], ["hiden", "did you mean hidden"]),
        (["--optimizer.lrr", "1"], ["lrr", "did you mean lr"]),
        (["--optimizer", "Foo"], ["--model.optimizer Foo"]),
        (["--model.network.hidden", "0"], ["--model.network.hidden 0"]),
        (["--data.source", "cifar"], ["--data.source cifar", "did you mean cifar10"]),
        (["--data.source", "folder", "--data.root", "nowhere"], ["--data.root nowhere", "does not exist"]),
        (["--data.source", "folder"], ["--data.root data", "does not exist"]),
        (["--lr", "abc"], ["--lr abc"]),
        (["--data.alternate_flip", "true", "--data.flip", "false"], ["--data.alternate_flip true", "--data.flip false"]),
        (["--batch_size", "many"], ["batch_size", "many", "int"]),
        (["--precision", "7"], ["precision 7", "bf16-mixed"]),
        (["--seed", "-1"], ["--seed -1", "0 to"]),
        (["--seed", "true"], ["--seed True", "0 to"]),
        (["--checkpoint_every", "-1"], ["--checkpoint_every -1"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--max_epochs", "1", "surplus"], ["surplus"]),
        (["--trainer.fast_dev_run", "-3"], ["fast_dev_run"]),
        (["--trainer.overfit_batches", "3"], ["overfit_batches 3", "--trainer.limit_train_batches"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_that_names_the_flag_and_the_remedy(args: list[str], says: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        cli(*args)
    assert all(part in str(error.value) for part in says), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("trainer:\n  max_epoch: 1", "trainer.max_epoch is not a setting; did you mean trainer.max_epochs"),
        ("data:\n  batchsize: 1", "data.batchsize is not a setting; did you mean data.batch_size"),
        ("modell:\n  max_grad_norm: 1", "did you mean model.max_grad_norm"),
        ("model:\n  network:\n    class_path: ConvNet\n    init_args:\n      hiden: 1", "did you mean hidden"),
    ],
)
def test_a_misspelt_yaml_key_is_named_with_the_nearest(yaml: str, says: str) -> None:
    Path("config.yaml").write_text(yaml)
    with pytest.raises(UsageError, match=says):
        cli("--config", "config.yaml")


@pytest.mark.parametrize(
    ("args", "exit_line"),
    [
        (["--devices", "0", "--accelerator", "cpu"], "error: --devices 0"),
        (["--data.source", "cifar10"], "error: --data.source cifar10"),
        (["--data.source", "synthetic", "--lr", "-1"], "error: --optimizer or --lr_scheduler: Invalid learning rate"),
        (["--data.source", "synthetic", "--lr_scheduler.warmup", "2"], "--lr_scheduler.warmup 2.0"),
        (["--data.source", "cifar10", "--strategy", "ddp", "--devices", "2"], "error: --data.source cifar10"),
        (["--data.source", "synthetic", "--max_epochs", "-1"], "error: --lr_scheduler needs to know"),
        (["--data.source", "synthetic", "--log_dir", "/dev/null/logs"], "error: --log_dir /dev/null/logs"),
        (["--data.source", "synthetic", "--data.cache_dir", "/dev/null/x"], "error: --data.cache_dir /dev/null/x"),
        (
            ["--data.source", "synthetic", "--batch_size", "9000", "--accelerator", "cpu", "--devices", "2"],
            "error: --batch_size 9000 is more than the 5400 training images",
        ),
    ],
    ids=" ".join,
)
def test_the_process_prints_that_line_alone_and_exits_with_2(args: list[str], exit_line: str, tmp_path: Path) -> None:
    result = python(TRAIN, *args, cwd=tmp_path)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("preparing")]
    assert (result.returncode, len(lines)) == (2, 1), result.stderr
    assert exit_line in lines[0]
    assert not list(tmp_path.glob("logs/*/*"))
    if (tmp_path / "logs").exists():
        (tmp_path / "logs" / "default").rmdir()
        (tmp_path / "logs").rmdir()


def test_short_and_long_flags_are_the_same() -> None:
    short = cli("--max_epochs", "3", "--batch_size=32", "--lr", "0.5", "--optimizer.momentum", "0.1", "--devices", "1")
    long = cli(
        *("--trainer.max_epochs", "3", "--data.batch_size", "32", "--model.optimizer.lr", "0.5"),
        *("--model.optimizer.momentum", "0.1", "--trainer.devices", "1"),
    )
    assert short.config == long.config
    assert short.config.model.optimizer.init_args.lr == 0.5
    assert short.config.data.batch_size == 32


def test_the_optimizer_and_the_schedule_are_choosable() -> None:
    built = cli("--optimizer", "AdamW", "--lr", "0.1", "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "3")
    optimizer = built.model.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 0.1
    assert built.model.make_lr_scheduler(optimizer).step_size == 3
    assert cli("--lr_scheduler", "null").model.make_lr_scheduler is None


def test_the_network_is_told_the_classes_and_the_size(image_folder: ImageFolder) -> None:
    root = image_folder([2, 2, 2], [1, 1, 1])
    model = cli("--data.source", "folder", "--data.root", str(root), "--data.image_size", "48").model
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 3)
    assert model.evaluations["test"].by_class.num_classes == 3


@pytest.mark.slow  # six processes, one after another
def test_help_shows_the_short_flags_first_and_is_quick(tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {"help": [], "import": []}
    for _ in range(3):
        start = time.perf_counter()
        result = python(TRAIN, "--help", cwd=tmp_path)
        seconds["help"].append(time.perf_counter() - start)
        start = time.perf_counter()
        python("-c", "import lightning.pytorch", cwd=tmp_path)
        seconds["import"].append(time.perf_counter() - start)
    assert result.returncode == 0
    flags = result.stdout.partition("everything else:")[0]
    for flag in ("name", "log_dir", "checkpoint_every", *SHORT_FLAGS):
        assert f"  --{flag} " in flags
    assert len(flags.splitlines()) < 25
    assert min(seconds["help"]) < 1.5 * min(seconds["import"]), seconds


def test_the_script_takes_the_project_beside_it_whatever_is_installed(tmp_path: Path) -> None:
    other = tmp_path / "other" / "project"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another clone')")
    result = python(TRAIN, "--devices", "0", "--accelerator", "cpu", cwd=tmp_path, PYTHONPATH=str(other.parent))
    assert result.stderr.startswith("error: --devices 0"), result.stderr


def test_compiling_without_a_compiler_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(UsageError, match=r"^--compile needs a C\+\+ compiler, and /nowhere/g\+\+ is not there"):
        cli("--compile", "--data.source", "synthetic")


def test_ddps_gradients_lie_in_its_buckets() -> None:
    trainer = cli("--strategy", "ddp", "--devices", "2", "--data.source", "synthetic").trainer
    assert trainer.strategy._ddp_kwargs == {"gradient_as_bucket_view": True}

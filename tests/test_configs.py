"""Every shipped configuration parses, names its data source, and says what it claims."""

from pathlib import Path

import pytest
import torch
import yaml

from project.data.datamodule import ImageDataModule
from project.model.classifier import Classifier
from project.run.cli import TrainCLI
from project.run.notices import Notices
from tests.conftest import ROOT, train

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(Notices, "install", lambda self: None)


def config(*args: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(TrainCLI, "instantiate_classes", lambda self: None)  # 604 million parameters take a while
    return TrainCLI(Classifier, ImageDataModule, list(args)).config.as_dict()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_parses_names_its_source_and_leaves_hardware_to_the_command_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = yaml.safe_load(path.read_text())
    parsed = config("--config", str(path), monkeypatch=monkeypatch)
    assert parsed["trainer"]["max_epochs"] == written["trainer"]["max_epochs"]
    assert written["data"]["source"] == "cifar10"
    assert not {"devices", "accelerator", "strategy", "num_nodes"} & set(written["trainer"])


def test_the_default_recipe_is_the_defaults_but_for_source_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = config("--config", str(ROOT / "configs" / "cifar10.yaml"), monkeypatch=monkeypatch)
    bare = config(monkeypatch=monkeypatch)
    assert (bare["data"]["source"], bare["trainer"]["precision"]) == ("auto", None)
    recipe["data"]["source"], recipe["trainer"]["precision"] = "auto", None
    del recipe["config"], bare["config"]
    assert recipe == bare


def test_the_manual_programs_setting_is_the_articles_at_the_default_width() -> None:
    manual, documents = (yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()) for name in ("manual", "documents"))
    documents["model"]["network"]["init_args"] |= {"channels": [16, 16, 32, 32, 64, 64], "hidden": 128}
    assert manual == documents


def test_the_articles_setting_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    written = config("--config", str(ROOT / "configs" / "documents.yaml"), monkeypatch=monkeypatch)
    optimizer = written["model"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.SGD"
    assert (optimizer["init_args"]["lr"], optimizer["init_args"]["momentum"]) == (0.01, 0.0)
    assert optimizer["init_args"]["weight_decay"] == 0
    assert written["model"]["lr_scheduler"] is written["model"]["max_grad_norm"] is None
    assert written["data"] | {"batch_size": 64, "shift": 0, "flip": False, "normalize": False} == written["data"]
    assert written["model"]["network"]["init_args"]["channels"] == [32, 64, 512, 1024, 2048, 4096]


def test_the_speed_recipe_uses_every_training_image_and_none_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = config("--config", str(ROOT / "configs" / "speed.yaml"), monkeypatch=monkeypatch)
    assert recipe["data"]["val_fraction"] == 0
    assert 50_000 % recipe["data"]["batch_size"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "manual", "speed"])  # documents: test_the_articles_network_trains_two_steps
def test_a_shipped_config_trains_a_step(name: str, tmp_path: Path) -> None:
    step = ["--data.source", "synthetic", "--accelerator", "cpu", "--trainer.max_steps", "1"]
    train(tmp_path, "--config", ROOT / "configs" / f"{name}.yaml", *step, "--trainer.limit_test_batches", "1")
    last = tmp_path / "logs" / "default" / "version_0" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 1

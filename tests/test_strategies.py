"""`--strategy dp`: what it computes on several devices (simulated, or real GPUs), and what it says without them."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import project
from project.data.datamodule import ImageDataModule
from project.errors import UsageError
from project.model.classifier import Classifier
from project.model.networks import ConvNet
from project.run.strategies import DataParallelStrategy
from tests.conftest import NARROW, ROOT, python, train
from tests.programs.one_leg import one_leg
from tests.simulated_devices import simulate

assert project.__name__
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
CPU: dict[str, Any] = {"accelerator": "cpu", "enable_model_summary": False, **QUIET}
ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_TWO_OR_THREE = pytest.mark.parametrize("devices", [2, 3])


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DataParallel split over simulated devices in this process."""
    simulate(monkeypatch.setattr)


class Own(LightningModule):
    """A module of a user's own, that knows nothing of this project; remembers what its replicas saw."""

    seen: list[tuple[list[int], torch.device, torch.dtype, tuple[bool, bool]]]

    def __init__(self, network: nn.Module | None = None, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.network = network or nn.Linear(5, 2)
        self.learning_rate = learning_rate
        self.seen = []
        self.steps: list[list[int]] = []

    def forward(self, images: Tensor) -> Tensor:
        logits = self.network(images)
        state = (self.device, logits.dtype, (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        self.seen.append((list(images.shape), *state))  # the list, unlike a name, is shared with the copies
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.steps.append(list(logits.shape))
        loss = functional.cross_entropy(logits.float(), batch[1])
        self.log("loss", loss)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("correct", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def vectors(count: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 5, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size)


def shapes(module: Own) -> list[list[int]]:
    return sorted((shape for shape, *_ in module.seen), reverse=True)


# ---- anybody's module


def test_a_mistake_that_a_replica_finds_stays_one_line(simulated: None, cache: Path) -> None:
    module = Classifier(ConvNet((4, 4, 8, 8, 8, 8), 16, num_classes=7))
    trainer = Trainer(strategy="dp", devices=2, max_epochs=1, **CPU)
    with pytest.raises(UsageError) as error:
        trainer.fit(module, ImageDataModule("synthetic", cache_dir=str(cache)))
    assert str(error.value) == "--model.network ConvNet returns [250, 7] for 250 images; it must return [250, 10]"


@ON_TWO_OR_THREE
@pytest.mark.parametrize("batch_size", [64, 33, 1])
def test_a_module_of_ones_own_is_split_and_its_step_runs_once(devices: int, batch_size: int, simulated: None) -> None:
    module = Own()
    trainer = Trainer(strategy="dp", devices=devices, max_epochs=1, **CPU)
    trainer.fit(module, vectors(batch_size, 64))
    parts = [len(part) for part in torch.arange(batch_size).chunk(devices)]
    assert shapes(module) == [[part, 5] for part in parts]
    assert module.steps == [[batch_size, 2]]
    assert "forward" not in vars(module)  # put back


def test_a_last_batch_smaller_than_the_number_of_devices(simulated: None) -> None:
    module = Own()
    Trainer(strategy="dp", devices=3, max_epochs=1, **CPU).fit(module, vectors(14, 6))
    assert module.steps == [[6, 2], [6, 2], [2, 2]]
    assert shapes(module) == [[2, 5]] * 6 + [[1, 5]] * 2


def test_evaluation_and_prediction_are_split_too_in_inference_mode(simulated: None) -> None:
    module = Own()
    trainer = Trainer(strategy="dp", devices=2, **CPU)
    figures = trainer.test(module, vectors(40, 20), verbose=False)[0]
    predictions = torch.cat(trainer.predict(module, vectors(40, 20)))
    assert [part for part, *_ in module.seen] == [[10, 5]] * 8
    assert all(modes == (True, False) for *_, modes in module.seen)
    inputs, labels = vectors(40, 20).dataset.tensors
    assert torch.allclose(predictions, module.network(inputs), atol=1e-6)
    assert figures["correct"] == pytest.approx((predictions.argmax(1) == labels).float().mean().item())


def test_a_replica_computes_gradients_only_where_its_caller_does(simulated: None) -> None:
    module = Own()
    Trainer(strategy="dp", devices=2, inference_mode=False, **CPU).predict(module, vectors(8, 8))
    Trainer(strategy="dp", devices=2, max_epochs=1, **CPU).fit(module, vectors(8, 8))
    assert [modes for *_, modes in module.seen] == [(False, False)] * 2 + [(False, True)] * 2


def test_a_replica_computes_in_its_callers_autocast_type_not_in_the_threads_own(simulated: None) -> None:
    class InHalf(Own):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with torch.autocast("cpu", torch.float16):  # a new thread has bfloat16
                return super().training_step(batch, batch_idx)

    module = InHalf()
    Trainer(strategy="dp", devices=2, max_epochs=1, **CPU).fit(module, vectors(8, 8))
    assert [dtype for _, _, dtype, _ in module.seen] == [torch.float16] * 2


def test_a_compiled_network_is_copied_too_and_runs_uncompiled(simulated: None) -> None:
    class Noting(nn.Linear):
        ids: list[int] = []

        def forward(self, inputs: Tensor) -> Tensor:
            self.ids.append(id(self))
            return super().forward(inputs)

    module = Own(Noting(5, 2))
    module.network.compile(backend="eager")
    with pytest.warns(UserWarning, match="uncompiled"):
        Trainer(strategy="dp", devices=2, max_epochs=1, **CPU).fit(module, vectors(8, 8))
    assert len(set(Noting.ids)) == 2
    assert id(module.network) not in Noting.ids


def test_a_step_that_gives_it_nothing_to_split_is_pointed_out(simulated: None) -> None:
    class PastIt(Own):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return functional.cross_entropy(self.network(batch[0]), batch[1])

    with pytest.warns(UserWarning, match=r"self\(x\), which PastIt.training_step does not call") as warned:
        Trainer(strategy="dp", devices=2, max_epochs=1, **CPU).fit(PastIt(), vectors(24, 8))
    assert len([w for w in warned if "PastIt" in str(w.message)]) == 1


def test_each_replica_knows_its_own_device(simulated: None) -> None:
    module = Own()
    Trainer(strategy="dp", devices=3, **CPU).predict(module, vectors(9, 9))
    assert {str(device) for _, device, *_ in module.seen} == {"cpu:0", "cpu:1", "cpu:2"}
    assert module.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
def test_every_replica_computes_in_the_precision_asked_for(precision: Any, dtype: torch.dtype, simulated: None) -> None:
    module = Own()
    trainer = Trainer(strategy="dp", devices=2, precision=precision, max_epochs=1, **CPU)
    trainer.fit(module, vectors(8, 8))
    assert [seen for _, _, seen, _ in module.seen] == [dtype, dtype]


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}], ids=str)
def test_accumulated_and_clipped_gradients_are_those_of_one_device(options: dict[str, Any], simulated: None) -> None:
    weights = []
    for strategy, devices in (("auto", 1), ("dp", 3)):
        seed_everything(0, verbose=False)
        module = Own()
        start = module.network.weight.detach().clone()
        trainer = Trainer(strategy=strategy, devices=devices, max_epochs=2, **options, **CPU)
        trainer.fit(module, vectors(40, 8))
        weights.append(module.network.weight.detach())
        assert not torch.equal(start, weights[-1])
    assert torch.allclose(*weights, atol=1e-6)


def test_an_error_in_a_replica_ends_the_run_and_leaves_the_module_as_it_was(simulated: None) -> None:
    class Broken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise RuntimeError("the network is broken")

    module = Own(Broken())
    module.unused = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match="the network is broken"):
        Trainer(strategy="dp", devices=2, max_epochs=1, **CPU).fit(module, vectors(8, 8))
    assert "forward" not in vars(module)


def test_batchnorm_keeps_the_first_devices_statistics_and_says_so(simulated: None) -> None:
    module = Own(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)), learning_rate=0.0)
    with pytest.warns(UserWarning, match=r"BatchNorm.*--strategy dp.*--strategy ddp") as warned:
        Trainer(strategy="dp", devices=2, max_epochs=1, **CPU).fit(module, vectors(8, 8))
    assert len([w for w in warned if "--strategy dp" in str(w.message)]) == 1
    first_part = vectors(8, 8).dataset.tensors[0][:4]
    assert torch.allclose(module.network[0].running_mean, 0.1 * first_part.mean(0), atol=1e-6)


def test_sync_batchnorm_is_refused() -> None:
    trainer = Trainer(strategy="dp", sync_batchnorm=True, max_epochs=1, **CPU)
    with pytest.raises(UsageError, match=r"sync_batchnorm true.*--strategy ddp"):
        trainer.fit(Own(), vectors(8, 8))


def test_a_forward_put_on_the_object_is_refused_and_left_there(simulated: None) -> None:
    module = Own()
    module.forward = module.network.forward  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="forward of the class Own"):
        Trainer(strategy="dp", devices=2, max_epochs=1, **CPU).fit(module, vectors(8, 8))
    assert module.forward == module.network.forward


def test_without_a_gpu_it_trains_on_one_device_with_one_warning() -> None:
    module = Own()
    trainer = Trainer(strategy="dp", devices=2, max_epochs=1, **CPU)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, vectors(12, 6))
        trainer.test(module, vectors(12, 6), verbose=False)
    said = [str(w.message) for w in warned if "--strategy" in str(w.message)]
    assert len(said) == 1
    assert "one device trains" in said[0]
    assert "--strategy ddp" in said[0]
    assert module.steps == [[6, 2], [6, 2]]
    assert {tuple(shape) for shape, *_ in module.seen} == {(6, 5)}


def test_import_project_alone_is_enough(tmp_path: Path) -> None:
    program = "import project\nfrom lightning.pytorch import Trainer\n"
    program += "print(type(Trainer(strategy='dp', accelerator='cpu', logger=False).strategy).__name__)"
    result = python("-c", program, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.stdout.strip() == "DataParallelStrategy", result.stderr


# ---- the template's own


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def weights_after_30_steps(strategy: Any, recipe: str, batch_size: int, cache: Path, **options: Any) -> dict[str, Tensor]:
    """Augmentation is on. Why these two recipes: see IN_FLOAT64 in test_train.py."""
    seed_everything(0, verbose=False)
    if recipe == "articles":
        module = Classifier(ConvNet((4, 4, 8, 8, 8, 8), 16, activation="none"), sgd, None, None)
    else:
        module = Classifier(ConvNet((4, 4, 8, 8, 8, 8), 16))
        options["precision"] = "64-true"
    data = ImageDataModule("synthetic", batch_size=batch_size, eval_batch_size=20, cache_dir=str(cache))
    options = {"accelerator": "cpu", "max_epochs": 10, "max_steps": 30, "limit_val_batches": 1} | options
    Trainer(strategy=strategy, enable_model_summary=False, **options, **QUIET).fit(module, data)
    return module.state_dict()


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


RECIPES = pytest.mark.parametrize(("recipe", "tolerance"), [("articles", 1e-6), ("default", 1e-12)])
BATCH_SIZES = pytest.mark.parametrize("batch_size", [64, 33, 1])


@RECIPES
@BATCH_SIZES
def test_dp_ends_with_the_weights_of_one_device(
    recipe: str, tolerance: float, batch_size: int, cache: Path, simulated: None
) -> None:
    one = weights_after_30_steps("auto", recipe, batch_size, cache, devices=1)
    start = weights_after_30_steps("auto", recipe, batch_size, cache, devices=1, max_steps=0)
    assert largest_difference(one, start) > 1e-3
    for devices in (2, 3):
        split = weights_after_30_steps("dp", recipe, batch_size, cache, devices=devices)
        assert not any("module." in name for name in split)
        assert largest_difference(split, one) < tolerance


def test_the_command_splits_and_its_summary_says_how(tmp_path: Path, cache: Path) -> None:
    flags = ["--data.source", "synthetic", "--data.cache_dir", cache, "--max_epochs", 1, *NARROW]
    flags += ["--trainer.limit_train_batches", 3]
    program = [
        "-m",
        "tests.simulated_devices",
        ROOT / "scripts" / "train.py",
        "--accelerator",
        "cpu",
        "--strategy",
        "dp",
        "--devices",
        3,
    ]
    result = python(*program, *flags, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    assert "3 steps of 64 images on 3 x cpu (dp)" in result.stdout
    folder = tmp_path / "logs" / "default" / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["strategy"], summary["world_size"], summary["device_batch_size"]) == ("dp", 1, 22)
    assert summary["num_test_images_counted"] == 2000
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert not any("module." in name for name in checkpoint["state_dict"])


@pytest.mark.slow
def test_a_checkpoint_goes_from_dp_to_cpu_to_ddp_and_back(tmp_path: Path, cache: Path, simulated: None) -> None:
    straight, around = str(tmp_path / "straight.ckpt"), str(tmp_path / "around.ckpt")
    one_leg(str(cache), straight, "auto", 1, epochs=4)
    one_leg(str(cache), around, "dp", 3, epochs=1)
    one_leg(str(cache), around, "auto", 1, epochs=2)
    ddp = python(ROOT / "tests" / "programs" / "one_leg.py", cache, around, "ddp", 2, 3, cwd=tmp_path)
    assert ddp.returncode == 0, ddp.stderr
    one_leg(str(cache), around, "dp", 2, epochs=4)
    checkpoints = [torch.load(path, weights_only=True) for path in (straight, around)]
    assert [checkpoint["global_step"] for checkpoint in checkpoints] == [20, 20]
    assert largest_difference(*(checkpoint["state_dict"] for checkpoint in checkpoints)) < 1e-12
    momenta = [checkpoint["optimizer_states"][0]["state"][0]["momentum_buffer"] for checkpoint in checkpoints]
    assert torch.allclose(*momenta, atol=1e-12)
    assert momenta[0].dtype == torch.float64


def test_on_a_machine_without_gpus_it_trains_with_exactly_one_warning(tmp_path: Path, cache: Path) -> None:
    short = ["--data.source", "synthetic", "--max_epochs", "1", "--trainer.limit_train_batches", "3", *NARROW]
    result = train(tmp_path, "--strategy", "dp", *short, "--data.cache_dir", cache)
    warned = [line for line in result.stderr.splitlines() if "warning" in line.lower()]
    assert len(warned) == 1
    assert "--strategy ddp" in warned[0]
    assert "3 steps of 64 images on 1 x cpu (dp)" in result.stdout


# ---- real GPUs


ON_GPU: dict[str, Any] = {"accelerator": "gpu"}


def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuDNN choose the same algorithm every time, and multiply whole float32."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.gpu
@ONE_GPU
@RECIPES
@BATCH_SIZES
def test_dp_on_one_gpu_twice_ends_with_the_weights_of_one_device(
    recipe: str, tolerance: float, batch_size: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    deterministic(monkeypatch)
    twice = weights_after_30_steps(DataParallelStrategy([gpu, gpu]), recipe, batch_size, cache, **ON_GPU)
    one = weights_after_30_steps("auto", recipe, batch_size, cache, **ON_GPU, devices=1)
    assert largest_difference(twice, one) < tolerance


@pytest.mark.multi_gpu
@TWO_GPUS
@RECIPES
@BATCH_SIZES
def test_dp_on_two_gpus_ends_with_the_weights_of_one(
    recipe: str, tolerance: float, batch_size: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic(monkeypatch)
    two = weights_after_30_steps("dp", recipe, batch_size, cache, **ON_GPU, devices=[0, 1])
    one = weights_after_30_steps("auto", recipe, batch_size, cache, **ON_GPU, devices=1)
    assert largest_difference(two, one) < tolerance


@pytest.mark.gpu
@ONE_GPU
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_on_a_real_gpu_every_replica_computes_in_the_precision_asked_for(precision: Any, dtype: torch.dtype) -> None:
    gpu = torch.device("cuda", 0)
    module, strategy = Own(), DataParallelStrategy([gpu, gpu])
    Trainer(strategy=strategy, precision=precision, max_epochs=1, **QUIET).fit(module, vectors(8, 8))
    assert [seen for _, _, seen, _ in module.seen] == [dtype, dtype]


@pytest.mark.multi_gpu
@TWO_GPUS
def test_devices_chooses_the_gpus(tmp_path: Path) -> None:
    flags = ["--strategy", "dp", "--accelerator", "gpu", "--data.source", "synthetic", "--explain", "--devices"]
    both = train(tmp_path, *flags, "0,1", CUDA_VISIBLE_DEVICES="0,1").stdout
    assert all(f"rank 0 on cuda:{gpu}: In model: input [32, 3, 32, 32] output [32, 10]" in both for gpu in (0, 1))
    second = train(tmp_path, *flags, "1,", CUDA_VISIBLE_DEVICES="0,1").stdout
    assert re.findall("on (.*): In model: input .*", second) == ["cuda:1"]

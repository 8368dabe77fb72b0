"""`--strategy dp`: torch.nn.DataParallel as a Lightning strategy. Lightning itself has had none since 2.0."""

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from project.errors import UsageError


class DataParallelStrategy(SingleDeviceStrategy):
    """One process on several GPUs: `self(x)` in the module's steps splits the batch, a replica on each GPU runs its part.

    The steps themselves run once, on the first GPU, where the outputs come together; backward, too, runs on every
    replica, and the first GPU adds the gradients up. Any LightningModule whose steps call `self(x)` works. Nothing enters
    `state_dict`, so checkpoints are the same as those of every other strategy. Without NVIDIA or AMD GPUs DataParallel
    passes everything through: one device trains, and a warning says so.

    BatchNorm takes its statistics from each GPU's part, and keeps the first GPU's running averages, as DataParallel does
    it. What a forward pass stores on `self` is lost on all replicas.

    Args:
        parallel_devices: The GPUs; None for those that the Trainer's `devices` chooses.
        accelerator: As for every strategy; the Trainer sets it.
        checkpoint_io: As for every strategy; the Trainer sets it.
        precision_plugin: As for every strategy; the Trainer sets it.
    """

    strategy_name = "dp"

    def __init__(
        self,
        parallel_devices: list[torch.device] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self.parallel_devices = parallel_devices  # Lightning fills it in
        self._layer_sync: Any = None  # the same, with --trainer.sync_batchnorm
        self._warned = False

    @property
    def root_device(self) -> torch.device:
        """The device of the module, of the steps and of the gathered outputs."""
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    @property
    def splits(self) -> bool:
        """Whether DataParallel can split batches over devices of this kind."""
        return self.root_device.type == "cuda"

    @property
    def num_replicas(self) -> int:
        """Parts that a batch is split into."""
        return len(self.parallel_devices or [0]) if self.splits else 1

    def setup(self, trainer: Trainer) -> None:
        """Make the module's forward the parallel one, once it is on its device."""
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None:
            raise UsageError("--trainer.sync_batchnorm true: DataParallel cannot do it; use --strategy ddp")
        if "forward" in vars(module):
            raise UsageError(f"--strategy dp needs the forward of the class {type(module).__name__}; its object has another")
        super().setup(trainer)
        if self.splits:
            # step 10: nn.DataParallel, around the forward pass alone, so that no name in the state_dict changes
            module.forward = _ParallelForward(_Replica(module), self.parallel_devices).forward  # type: ignore[method-assign]
        self._warn(trainer, module)

    def teardown(self) -> None:
        """Give the module its own forward back."""
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("forward", None)
        super().teardown()

    def _warn(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.splits and not self._warned:
            warnings.warn(
                f"--strategy dp splits batches over GPUs; on {self.root_device.type} nothing is split and one device trains."
                " For several processes use --strategy ddp --devices 2",
                stacklevel=2,
            )
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.num_replicas > 1 and fitting and any(isinstance(m, _BatchNorm) for m in module.modules()):
            warnings.warn(
                "the network has BatchNorm, which under --strategy dp takes its statistics from each GPU's part of the"
                " batch alone; --strategy ddp with --trainer.sync_batchnorm true takes them from the global batch",
                stacklevel=2,
            )
        self._warned = True


class _Replica(nn.Module):
    """What DataParallel copies to each GPU: it calls the class's own forward, on the copy."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.contexts: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            return type(self.module).forward(self.module, *args, **kwargs)


class _ParallelForward(nn.DataParallel[_Replica]):
    """DataParallel, mended in what its threads and copies do not take over from the thread that calls them."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        kind = self.src_device_obj.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        for replica, index in zip(replicas, self.device_ids, strict=False):
            # A thread begins with autocast's default type, float16, whatever --precision says, and without inference mode.
            replica.contexts = [
                torch.autocast(kind, dtype, enabled),
                torch.inference_mode(torch.is_inference_mode_enabled()),
            ]
            for module in replica.modules():
                if isinstance(module, LightningModule):  # `self.device` has no setter
                    module._device = torch.device(kind, index)
        return super().parallel_apply(replicas, inputs, kwargs)


StrategyRegistry.register(
    "dp", DataParallelStrategy, description="torch.nn.DataParallel: one process, batches split over the GPUs", override=True
)

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
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from project.errors import UsageError
from project.model.dropout import Dropout


class DataParallelStrategy(SingleDeviceStrategy):
    """One process on several GPUs: `self(x)` in the module's steps splits the batch, a replica on each GPU runs its part.

    The steps themselves run once, on the first GPU, where the outputs come together; backward, too, runs on every
    replica, and the first GPU adds the gradients up. Any LightningModule whose steps call `self(x)` is split. Nothing enters
    `state_dict`, so checkpoints are the same as those of every other strategy. Without NVIDIA or AMD GPUs DataParallel
    passes everything through: one device trains, and a warning says so.

    BatchNorm takes its statistics from each GPU's part, and keeps the first GPU's running averages, as DataParallel does
    it. Its other limits hold too: what a forward pass stores on `self` is lost, outputs that are single numbers come
    together as a vector, and a compiled network runs uncompiled, with a warning.

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
        self.num_nodes = 1  # the same
        self._layer_sync: Any = None  # the same, with --trainer.sync_batchnorm
        self._parallel: _ParallelForward | None = None
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
        if self.num_nodes > 1:
            raise UsageError(f"--num_nodes {self.num_nodes}: dp is one process on one machine; use --strategy ddp")
        if self._layer_sync is not None:
            raise UsageError("--trainer.sync_batchnorm true: DataParallel cannot do it; use --strategy ddp")
        if self.splits and "forward" in vars(module):  # torch.compile(module) leaves one
            raise UsageError(
                f"--strategy dp needs the forward of the class {type(module).__name__}, and the object has one of its own;"
                " give the module as its class makes it, not compiled as a whole"
            )
        super().setup(trainer)
        if self.splits:
            # step 10: nn.DataParallel, around the forward pass alone, so that no name in the state_dict changes
            self._parallel = _ParallelForward(_Replica(module), self.parallel_devices)
            module.forward = self._parallel.forward  # type: ignore[method-assign]
        self._warn(module)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's step, once; say so if it gave DataParallel nothing to split."""
        output = super().training_step(*args, **kwargs)
        if self._parallel is not None and not self._parallel.used:
            self._parallel.used = True
            warnings.warn(
                f"--strategy dp splits what goes through self(x), which {type(self.lightning_module).__name__}.training_step"
                " does not call: one GPU does it all",
                stacklevel=2,
            )
        return output

    def teardown(self) -> None:
        """Give the module its own forward back."""
        if self._parallel is not None:
            del vars(self.lightning_module)["forward"]
            self._parallel = None
        super().teardown()

    def _warn(self, module: LightningModule) -> None:
        if self._warned:  # for fit, that is, and not for test again
            return
        self._warned = True
        if not self.splits:
            warnings.warn(
                f"--strategy dp splits batches over GPUs; on {self.root_device.type} nothing is split and one device trains."
                " For several processes use --strategy ddp --devices 2",
                stacklevel=3,
            )
        elif self.num_replicas > 1 and any(isinstance(m, _BatchNorm) for m in module.modules()):
            warnings.warn(
                "the network has BatchNorm, which under --strategy dp takes its statistics from each GPU's part of the"
                " batch alone; --strategy ddp with --trainer.sync_batchnorm true takes them from the global batch",
                stacklevel=3,
            )


class _Replica(nn.Module):
    """What DataParallel copies to each GPU: it calls the class's own forward, on the copy."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.contexts: list[Any] = []
        self.mistakes: list[UsageError] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            try:
                return type(self.module).forward(self.module, *args, **kwargs)
            except UsageError as error:
                self.mistakes.append(error)
                raise


class _ParallelForward(nn.DataParallel[_Replica]):
    """DataParallel, whose threads and copies also take over autocast's type, inference mode and their device."""

    used = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.used = True
        return super().forward(*inputs, **kwargs)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        kind = self.src_device_obj.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        mistakes: list[UsageError] = []
        before = 0  # images of the replicas before this one
        for replica, index, arguments in zip(replicas, self.device_ids, inputs, strict=False):
            # A thread begins with autocast's default type, float16, whatever --precision says, and without inference mode.
            replica.contexts = [torch.autocast(kind, dtype, enabled)]
            if torch.is_inference_mode_enabled():
                replica.contexts.append(torch.inference_mode())
            replica.mistakes = mistakes
            part = len(arguments[0]) if arguments and isinstance(arguments[0], torch.Tensor) else 0
            for module in replica.modules():
                if isinstance(module, Dropout):
                    module.rows = slice(before, before + part)
                if isinstance(module, LightningModule):  # `self.device` has no setter
                    module._device = torch.device(kind, index)
                if getattr(module, "_compiled_call_impl", None) is not None:  # it would call the original, not this copy
                    module._compiled_call_impl = None
                    warnings.warn("--strategy dp runs a compiled network uncompiled; ddp runs it compiled", stacklevel=2)
            before += part
        try:
            return super().parallel_apply(replicas, inputs, kwargs)
        except UsageError as error:  # torch has put the replica's traceback into its text
            raise mistakes[0] from error


StrategyRegistry.register(
    "dp", DataParallelStrategy, description="torch.nn.DataParallel: one process, batches split over the GPUs", override=True
)

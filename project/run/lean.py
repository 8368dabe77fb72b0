"""What Lightning does in every training step and need not, taken out: it changes how long a step takes, nothing else.

All of it is private to Lightning, with no public way to say so; tests tell where a new version does it otherwise.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler

from project.run.signals import stop_signal

HOOKS_OF_A_STEP = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)


class LeanSteps(Callback):
    """Take it out when the training starts."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have Lightning find out once, not in every step, which hooks there are to call, and ask no other rank."""
        # Whose hook gets a batch, the module's or the data module's, and whether there is something to validate.
        selector, source = trainer._data_connector._datahook_selector, trainer.fit_loop.epoch_loop.val_loop._data_source
        selector.get_instance = cache(selector.get_instance)  # type: ignore[method-assign, union-attr]
        source.is_defined = cache(source.is_defined)  # type: ignore[method-assign]
        # A hook that a callback does not have does nothing, at some length; one that cannot be called is passed over.
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for name in HOOKS_OF_A_STEP:
                if getattr(type(callback), name) is getattr(Callback, name):
                    vars(callback).setdefault(name, None)
        # A collective before every ddp step, and a wait for the GPU, to hear of a SIGTERM. Our thread hears of signals.
        if stop_signal.listens:
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]


def _nothing() -> None:
    pass


class NoProfiler(PassThroughProfiler):
    """What Lightning does without a profiler, but without building a generator around each of some 80 actions a step."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return a context that does nothing."""
        return self._nothing

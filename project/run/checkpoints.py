"""The checkpoints of a run: saved where nothing is half done, and where a signal asks the run to stop."""

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from project.run.signals import stop_signal
from project.run.storage import DamagedCheckpoint, DurableCheckpointIO, read_checkpoint, write_durably


class RunCheckpoints(Checkpoint):
    """Keep `best.ckpt`, by validation accuracy, `last.ckpt`, and `previous.ckpt` in case the last is damaged.

    They are saved where nothing is half done: before a batch, before an epoch, or at the end. Lightning's counters are
    rewritten to say just that; its own ways to continue lose a validation, or the schedule's last advance, when a
    checkpoint is saved elsewhere. Signals stop the run at the same places.

    Args:
        every: Optimizer steps from one `last.ckpt` to the next, besides the one at the end of every epoch; 0 for that alone.
        config: The run's configuration as YAML, to go into every checkpoint.
        warnings: What the run has warned of so far; the same goes into every checkpoint.

    Attributes:
        best_model_path: The best checkpoint; empty where there is none.
        last_model_path: The most recent checkpoint; empty where there is none.
    """

    monitor = "val/accuracy"

    def __init__(self, every: int, config: str = "", warnings: list[str] | None = None) -> None:
        self.every = every
        self.config = config
        self.warnings = [] if warnings is None else warnings
        self.best_model_path = self.last_model_path = ""
        self.dirpath: str | None = None  # set once the run directory is known
        self.best_score: float | None = None
        self.best_step: int | None = None  # optimizer steps done at that validation
        self.resumed_from: str | None = None  # the checkpoint that this run continues
        self.in_place = True  # whether it does so in the same run directory
        self._metrics: dict[str, float] = {}  # what was logged last before a resumed run stopped
        self._settled = False
        self._last_saved = 0
        self._validated = False  # since the last boundary
        self._validations: int | None = 0  # done in this run directory, and not to be done again; None if not known
        self._place = ""  # of the save going on; empty for one that a callback of the user's makes

    def _path(self, name: str) -> str:
        return str(Path(self.dirpath or "", f"{name}.ckpt"))

    # ---- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen to the other ranks; bring the network into the run's precision before a checkpoint's weights come in."""
        stop_signal.join(trainer.global_rank, trainer.world_size)
        trainer.precision_plugin.convert_module(pl_module)  # Lightning does so later, when float64 would have been cut

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on a signal saves first."""
        self._settle(trainer)
        self._last_saved = trainer.global_step if self.in_place else 0
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._metrics.items()})
        early = [callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]  # type: ignore[attr-defined]
        trainer.should_stop = trainer.should_stop or any(callback.stopped_epoch > 0 for callback in early)  # as restored
        stop_signal.begin_training()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save after every so many steps, and where a signal wants the run to stop."""
        _is_under_way(trainer)
        # Before an epoch's first batch its start has had its turn; between the batches of one step gradients are pending.
        if batch_idx > 0 and batch_idx % trainer.accumulate_grad_batches == 0:
            self._boundary(trainer, "batch", self.every > 0 and trainer.global_step % self.every == 0)
        self._validated = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the epoch before."""
        self._boundary(trainer, "epoch", True)
        self._validated = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that begins with a validation is under way too."""
        _is_under_way(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Stop in the middle of a validation, which is then done from its beginning."""
        in_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        finished = 0 <= trainer.max_steps <= trainer.global_step  # Lightning would not validate again
        if in_fit and not finished and not _gradients_pending(trainer):
            self._boundary(trainer, "validation", False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was validated, if it is the best."""
        score = trainer.callback_metrics.get(self.monitor)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated = True
            if score is not None and (self.best_score is None or float(score) > self.best_score):
                self.best_score, self.best_step = float(score), trainer.global_step
                self._save(trainer, "validation", "best")
            self._validations = None if self._validations is None else self._validations + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end."""
        if trainer.global_step > 0:
            self._save(trainer, "end")
        stop_signal.end_training()

    def _boundary(self, trainer: Trainer, place: str, due: bool) -> None:
        stop = not stop_signal.passes()
        new = trainer.global_step != self._last_saved
        if new and (stop or due):
            self._save(trainer, place)
        if stop:
            stopped = stop_signal.stopped()
            if trainer.is_global_zero:
                saved = self.last_model_path or "nothing"
                go_on = f"--resume {Path(self.dirpath).parent}" if self.dirpath else "--resume"
                print(f"{stopped}: stopped after step {trainer.global_step}, saved {saved}; go on with {go_on}", flush=True)
            raise stopped

    # ---- what

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A finished run that is continued has no start."""
        self._settle(trainer)

    def _save(self, trainer: Trainer, place: str, name: str = "last") -> None:
        if trainer.fast_dev_run or self.dirpath is None or (trainer.global_step == 0 and name == "last"):  # type: ignore[attr-defined]
            return
        for logger in trainer.loggers:
            logger.save()  # whatever was logged before a checkpoint is on disk before it
        storage = trainer.strategy.checkpoint_io
        if isinstance(storage, DurableCheckpointIO) and name == "last":
            # Not at the same step, and not where the last one was found damaged.
            keep = self.last_model_path and self._last_saved != trainer.global_step
            storage.previous = Path(self._path("previous")) if keep else None
        self._place = place
        trainer.save_checkpoint(self._path(name))
        self._place = ""
        if name == "best":
            self.best_model_path = self._path(name)
        else:
            self.last_model_path, self._last_saved = self._path(name), trainer.global_step
            if isinstance(storage, DurableCheckpointIO):
                storage.previous = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what a run needs to be continued."""
        checkpoint["run"] = {
            "config": self.config,
            "warnings": list(self.warnings),
            "best_score": self.best_score,
            "best_step": self.best_step,
            "validations": self._validations,
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
            # At the other places the batches of a step are complete, and Lightning's counter is one ahead.
            "gradients_pending": self._place in ("", "validation") and _gradients_pending(trainer),
        }
        if self._place:
            _nothing_half_done(checkpoint["loops"]["fit_loop"], self._place, self._validated, trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take over what the run knew; not when a checkpoint is only tested."""
        if trainer.state.fn == "fit":
            run = checkpoint.get("run", {})
            self.best_score, self.best_step = run.get("best_score"), run.get("best_step")
            self._metrics = run.get("metrics", {})
            self._validations = run.get("validations") if self.in_place else 0
            self.warnings.extend(text for text in run.get("warnings", []) if text not in self.warnings)

    def _settle(self, trainer: Trainer) -> None:
        """Once a resumed run is sure to go on, find the best checkpoint of its history."""
        if self.resumed_from is not None and not self._settled:
            self._settled = True
            self._bring_best(trainer, Path(self.resumed_from))

    def _bring_best(self, trainer: Trainer, source: Path) -> None:
        """Have the best checkpoint so far as `best.ckpt`: it may be elsewhere, or from steps that are now done again."""
        found = False
        if trainer.is_global_zero and self.best_step is not None and self.dirpath is not None:
            best = Path(self._path("best"))
            for candidate in (source, source.with_name("best.ckpt")):
                if candidate.is_file() and _step_of(candidate) == self.best_step:
                    if not (best.exists() and best.samefile(candidate)):
                        with open(candidate, "rb") as file:
                            write_durably(best, lambda copy: shutil.copyfileobj(file, copy))
                    found = True
                    break
        if trainer.strategy.broadcast(found):
            self.best_model_path = self._path("best")
        else:
            self.best_score = self.best_step = None  # the next validation is the best
        if self.in_place and source.name == "last.ckpt":
            self.last_model_path = self._path("last")


def _gradients_pending(trainer: Trainer) -> bool:
    """Return, after a batch, whether its gradients wait for those of the next one."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return bool(batches.current.ready % trainer.accumulate_grad_batches) and not batches.is_last_batch


def _is_under_way(trainer: Trainer) -> None:
    """Have Lightning advance a schedule that watches a metric at the end of the epoch in which a run was continued, too.

    It leaves that out while it counts as restarting, until the epoch's very end. There is no public way to say otherwise.
    """
    trainer.fit_loop._restarting = False


def _step_of(path: Path) -> int | None:
    try:
        return read_checkpoint(path, mmap=True).get("global_step")
    except DamagedCheckpoint:
        return None


def _nothing_half_done(loops: dict[str, Any], place: str, validated: bool, trainer: Trainer) -> None:
    """Rewrite Lightning's counters for a checkpoint saved at one of our places. Tests hold it to Lightning's behaviour.

    Args:
        loops: The fit loop's state, as it goes into the checkpoint; changed in place.
        place: "batch", before a batch; "epoch", before an epoch; "validation", in a validation that must be done again; or
            "end", after the last step.
        validated: Whether a validation ended after the last batch.
        trainer: The trainer.
    """
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    steps_taken = loops["epoch_loop.state_dict"]
    inside = place in ("batch", "validation")
    if place == "end" and 0 < batches["current"]["ready"] < trainer.num_training_batches:  # max_steps ended it
        inside = True
        for counters in (epochs["total"], epochs["current"]):
            counters["processed"] -= 1
            counters["completed"] -= 1
    for counters in (batches["total"], batches["current"]):
        counters["ready"] = counters["started"] = counters["processed"] = counters["completed"]
    if not inside:
        for counters in (epochs["total"], epochs["current"]):
            counters["ready"] = counters["started"] = counters["processed"]
            counters["completed"] = counters["processed"]
        optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for progress in (batches, loops["epoch_loop.scheduler_progress"], optimizer["step"], optimizer["zero_grad"]):
            progress["current"] = dict.fromkeys(progress["current"], 0)
    nothing = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    validation = loops["epoch_loop.val_loop.batch_progress"]
    validation |= {"total": dict(nothing), "current": dict(nothing), "is_last_batch": False}
    if place == "validation":
        validation["total"] |= {"ready": 1, "started": 1}  # one begun and not done: Lightning validates first
    else:
        batches["is_last_batch"] = False
        if (inside and validated) or (not inside and trainer.max_steps != -1):
            steps_taken["_batches_that_stepped"] -= 1  # Lightning will add it again, in passing over the validation


class SaveWeights(Callback):
    """Keep the network's weights of every epoch as `weights/epoch_<n>.pth`, as the articles do.

    Each is a plain state_dict, without a prefix: `ConvNet(...).load_state_dict(torch.load(path, weights_only=True))`.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save on rank 0."""
        kept_in = getattr(trainer.checkpoint_callback, "dirpath", None)
        run = Path(kept_in).parent if kept_in else Path(trainer.log_dir or trainer.default_root_dir)  # log_dir: all ranks
        if trainer.is_global_zero:
            network: torch.nn.Module = pl_module.network  # type: ignore[assignment]
            path = run / "weights" / f"epoch_{trainer.current_epoch}.pth"
            write_durably(path, lambda file: torch.save(network.state_dict(), file))

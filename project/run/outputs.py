"""What a run writes and where: the run directory, the TensorBoard logger in it, and `config.yaml`."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from project.errors import UsageError
from project.run.exit import before_exit_2


class RunDirectory:
    """`<log_dir>/<name>/version_<n>`, made by rank 0 when it is first asked for; no two runs ever share one.

    Args:
        log_dir: Folder of all runs.
        name: Name of the experiment.
    """

    def __init__(self, log_dir: str, name: str) -> None:
        self.log_dir = Path(os.path.expandvars(log_dir)).expanduser()  # as Lightning's logger does
        self.name = name
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """The run directory; other ranks know it once `share` has run."""
        if self._path is None:
            if rank_zero_only.rank != 0:
                return self.log_dir / self.name
            self._path = self._make()
        return self._path

    def planned(self) -> Path:
        """Return what the directory would be called if it were made now."""
        return self.log_dir / self.name / f"version_{self._next()}"

    def share(self, trainer: Trainer) -> None:
        """Tell all ranks the directory that rank 0 made."""
        self._path = trainer.strategy.broadcast(self.path)

    def remove(self) -> None:
        """Remove the directory, if it was made."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None

    def _make(self) -> Path:
        experiment = self.log_dir / self.name
        try:
            experiment.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--log_dir {self.log_dir} cannot be written ({error}); name another folder") from error
        number = self._next()
        while True:
            path = experiment / f"version_{number}"
            try:
                path.mkdir()  # fails when another run was quicker
            except FileExistsError:
                number += 1
            else:
                return path

    def _next(self) -> int:
        taken = [path.name.removeprefix("version_") for path in (self.log_dir / self.name).glob("version_*")]
        return max((int(text) for text in taken if text.isdecimal()), default=-1) + 1


class RunLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger, writing into the run directory."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(str(run.log_dir), name=run.name, default_hp_metric=False)
        self.run = run

    @property
    def version(self) -> str:
        """The run directory's own name."""
        return self.run.path.name

    def save(self) -> None:
        """Flush the events; Lightning's hparams.yaml would only repeat config.yaml."""
        self.experiment.flush()


class SaveConfig(SaveConfigCallback):
    """Share the run directory with all ranks, and write `config.yaml` into it.

    Args:
        run: The run directory.
        args: As for Lightning's own callback.
        kwargs: As for Lightning's own callback.
    """

    def __init__(self, *args: Any, run: RunDirectory, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, save_to_log_dir=False)
        self.run = run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run before anything is written; Lightning sets checkpoint callbacks up after all others."""
        self.run.share(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.run.path / "checkpoints")
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the whole configuration, "auto" resolved, so that `--config` with it repeats the run."""
        config = self.config.clone()
        if "source" in config.data:
            config.data.source = trainer.datamodule.resolved_source  # type: ignore[attr-defined]
        self.parser.save(config, self.run.path / self.config_filename, skip_unset=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take back the directory of a run that the user's mistake ended before its first step, and its processes."""
        if isinstance(exception, UsageError) and trainer.is_global_zero and trainer.global_step == 0:
            self.run.remove()
            launcher = trainer.strategy.launcher
            if launcher is not None:
                before_exit_2(lambda: launcher.kill(signal.SIGKILL))

"""What a run writes and where: the run directory, the TensorBoard logger in it, and `config.yaml`."""

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from project.errors import UsageError
from project.run.checkpoints import RunCheckpoints
from project.run.cluster import meeting
from project.run.exit import LAUNCHED_BY_US
from project.run.notices import Notices
from project.run.resume import NEW_RUN, Continuation, purge
from project.run.storage import fingerprint, write_durably

SECONDS_TO_WAIT = 8  # for a run that was just killed: the workers of its data loaders need some to notice
JOB_FILE = ".job"  # in a run directory: which job of torchrun or Slurm works on it, or was the last


class RunDirectory:
    """`<log_dir>/<name>/version_<n>`, made, or taken up again, by rank 0 when it is first asked for.

    No two runs ever write to one: rank 0 locks it until its process ends.

    Args:
        log_dir: Folder of all runs.
        name: Name of the experiment.
        continued: The directory of an earlier run to go on in; None for a new one.

    Attributes:
        config: The run's configuration, YAML, as config.yaml has it once training has begun; empty until it is known.
    """

    def __init__(self, log_dir: str, name: str, continued: Path | None = None) -> None:
        self.log_dir = expanded(log_dir)
        self.name = name
        self.continued = continued
        self.config = ""
        self.earlier_events: list[Path] = []  # TensorBoard's files of the run that is continued
        self._path: Path | None = None
        self._lock: BaseFileLock | None = None

    @property
    def path(self) -> Path:
        """The run directory; other ranks know it once `share` has run."""
        if self._path is None:
            if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
                return self.continued or self.log_dir / self.name
            self._path = self._make() if self.continued is None else self._take_up(self.continued)
        return self._path

    def planned(self) -> Path:
        """Return what the directory would be called if it were made now."""
        return self.continued or self.log_dir / self.name / f"version_{self._next()}"

    def share(self, trainer: Trainer) -> None:
        """Tell all ranks the directory that rank 0 made."""
        self._path = trainer.strategy.broadcast(self.path)

    def remove(self) -> None:
        """Remove the directory, if this run has made it."""
        if self._path is not None and self.continued is None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock with this process; a spawned one goes without."""
        return {**vars(self), "_lock": None}

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
                break
        self._hold(path)
        return path

    def _take_up(self, path: Path) -> Path:
        self._hold(path)
        for left_over in path.rglob(".*.tmp"):  # of a writer that was killed
            left_over.unlink()
        self.earlier_events = sorted(path.glob("events.out.tfevents.*"))
        return path

    def _hold(self, path: Path) -> None:
        self._lock = FileLock(path / ".lock")
        try:
            self._lock.acquire(timeout=SECONDS_TO_WAIT)
        except Timeout as error:
            raise UsageError(f"--resume: {path} is still being written by another process; end that one first") from error
        if job := job_key():
            lines = "\n".join([job, *sorted(meeting.agents)])
            write_durably(path / JOB_FILE, lambda file: file.write(lines.encode()))

    def _next(self) -> int:
        return max(versions_of(self.log_dir / self.name), default=-1) + 1


def expanded(folder: str) -> Path:
    """Return a folder with the user's home and environment variables filled in, as Lightning's logger does."""
    return Path(os.path.expandvars(folder)).expanduser()


def versions_of(experiment: Path) -> list[int]:
    """Return the numbers of an experiment's run directories, in order."""
    names = (path.name.removeprefix("version_") for path in experiment.glob("version_*"))
    return sorted(int(text) for text in names if text.isdecimal())


def newest_run(log_dir: str, name: str, job: str | None = None) -> Path | None:
    """Return the newest run directory of an experiment, or of those that a job has worked on; None for no such run."""
    experiment = expanded(log_dir) / name
    for number in reversed(versions_of(experiment)):
        path = experiment / f"version_{number}"
        if job is None or _job_of(path)[0] == job:
            return path
    return None


def run_of_this_job(log_dir: str, name: str) -> Path | None:
    """Return the run that this job has worked on before, where torchrun or Slurm has started it again; None otherwise."""
    job = job_key()
    found = newest_run(log_dir, name, job) if job else None
    again = any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return found if found and (again or meeting.agents & {*_job_of(found)[1:]}) else None


def _job_of(path: Path) -> list[str]:
    """Return the key of the job that last worked on a run, and its torchruns."""
    return (path / JOB_FILE).read_text().split("\n") if (path / JOB_FILE).exists() else [""]


def job_key() -> str | None:
    """Return what torchrun or Slurm call this job, the same after a restart; None for a command of its own."""
    if "SLURM_JOB_ID" in os.environ and "SLURM_PROCID" in os.environ:
        return f"slurm {os.environ.get('SLURM_ARRAY_JOB_ID', '')} {os.environ['SLURM_JOB_ID']}"
    if "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHED_BY_US not in os.environ:
        run_id = os.environ["TORCHELASTIC_RUN_ID"]
        return f"torchrun {run_id}" if run_id != "none" else f"torchrun {socket.gethostname()} {os.getppid()}"
    return None


class RunLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger, writing into the run directory."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(str(run.log_dir), name=run.name, default_hp_metric=False, flush_secs=10)
        self.run = run
        self._step_of_epoch = -1

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars; which epoch it is, as Lightning adds to each lot of them, once a step, with those of training."""
        if "epoch" in metrics and step is not None:
            if step == self._step_of_epoch or any(name.startswith(("val", "test")) for name in metrics):
                metrics = {name: value for name, value in metrics.items() if name != "epoch"}
            self._step_of_epoch = step
        super().log_metrics(metrics, step)

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self.run.path)

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
        notices: Collects the warnings.
        continuation: What this process goes on from.
        args: As for Lightning's own callback.
        kwargs: As for Lightning's own callback.
    """

    def __init__(
        self,
        *args: Any,
        run: RunDirectory,
        notices: Notices,
        continuation: Continuation = NEW_RUN,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{**kwargs, "save_to_log_dir": False})
        self.run = run
        self.notices = notices
        self.continuation = continuation
        self._settled = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run before anything is written; Lightning sets checkpoint callbacks up after all others."""
        self.notices.install()  # in a spawned process not yet
        self.run.share(trainer)
        self._begin_as_rank_0(trainer)
        self.run.config = self._as_yaml(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint | RunCheckpoints) and callback.dirpath is None:
                callback.dirpath = str(self.run.path / "checkpoints")
            if isinstance(callback, RunCheckpoints):
                callback.config = self.run.config
        super().setup(trainer, pl_module, stage)

    def _begin_as_rank_0(self, trainer: Trainer) -> None:
        """Refuse to train where ranks begin differently: their machines do not see the same checkpoint."""
        found_here = self.continuation.checkpoint
        own = (self.continuation.step, fingerprint(found_here) if found_here else "")
        step, _ = found = trainer.strategy.broadcast(own)
        if not trainer.strategy.reduce_boolean_decision(found == own):
            raise UsageError(
                f"--resume: rank 0 goes on from step {step} of {self.run.path}, and other machines have another checkpoint,"
                " or none; put --log_dir on a disk that all machines see, or copy it to each"
            )

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the whole configuration, "auto" resolved, so that `--config` with it repeats the run."""
        if self.run.continued is None:
            self._write()

    def _write(self) -> None:
        write_durably(self.run.path / self.config_filename, lambda file: file.write(self.run.config.encode()))

    def _as_yaml(self, trainer: Trainer) -> str:
        config = self.config.clone()
        config.resume = config.explain = config.quiet = False  # they are this command's, not the run's
        if "source" in config.data:
            config.data.source = trainer.datamodule.resolved_source  # type: ignore[attr-defined]
        text: str = self.parser.dump(config, skip_unset=False)
        return text

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once a continued run is sure to go on, bring its files to where it goes on from."""
        self._settle(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same for one that had finished, and has no start."""
        if trainer.is_global_zero and self.run.continued is not None and not self._settled:
            print("resume: this run had finished, so nothing was left to train; what follows is its test", flush=True)
        self._settle(trainer)

    def _settle(self, trainer: Trainer) -> None:
        """Take the points of steps that are now done again out of TensorBoard's files, and write this configuration."""
        if self.run.continued is not None and trainer.is_global_zero and not self._settled:
            self._settled = True
            purge(self.run.earlier_events, trainer.global_step, self.continuation.validations)
            self._write()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take back the directory of a run that the user's mistake ended before its first step."""
        if isinstance(exception, UsageError) and trainer.is_global_zero and trainer.global_step <= self.continuation.step:
            self.run.remove()
            if self.run.continued is not None and not self._settled:  # refused: the logger's new file is all it has done
                for path in {*self.run.path.glob("events.out.tfevents.*")} - {*self.run.earlier_events}:
                    path.unlink()

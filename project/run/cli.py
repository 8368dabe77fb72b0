"""The command line: LightningCLI, with short flags, one-line errors, and everything a run writes."""

import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as BaseProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from project.data.datamodule import uneven_batch
from project.errors import UsageError
from project.run.board import Board
from project.run.callbacks import ProgressBar, RunRecord
from project.run.checkpoints import RunCheckpoints
from project.run.checks import Hardware, check_hardware
from project.run.cluster import (
    as_launched,
    check_launched,
    choose_network,
    cluster_plugins,
    launched_from_outside,
    meeting,
)
from project.run.exit import LAUNCHED_BY_US
from project.run.flags import OWN_FLAGS, SHORT_FLAGS, TrainParser, flag_of, timeout_of
from project.run.launch import launch
from project.run.lean import LeanSteps, NoProfiler
from project.run.memory import keep_freed_memory
from project.run.notices import Notices
from project.run.outputs import RunDirectory, RunLogger, SaveConfig, expanded, newest_run, run_of_this_job
from project.run.plan import ShowShapes, blank_batch, lacking, plan
from project.run.resume import FREE, NEW_RUN, Continuation, base_of, check_same, from_path, in_directory
from project.run.signals import stop_signal
from project.run.storage import DurableCheckpointIO, read_checkpoint
from project.run.summary import closing_lines, num_replicas, summarise, write_summary


class TrainCLI(LightningCLI):
    """Parse the command line and build the trainer, the model and the data from it.

    Args:
        model_class: The LightningModule.
        datamodule_class: The LightningDataModule.
        args: The command line; None for the process's own.
    """

    datamodule: LightningDataModule

    def __init__(
        self,
        model_class: type[LightningModule],
        datamodule_class: type[LightningDataModule],
        args: Sequence[str] | None = None,
    ) -> None:
        self.notices = Notices()
        self.notices.install()
        self._is_command = args is None
        self._launches = self._is_command and not launched_from_outside()
        meeting.meet(timeout_of(sys.argv))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            stop_signal.join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self.record = RunRecord()
        super().__init__(
            model_class,
            datamodule_class,
            save_config_callback=SaveConfig,
            trainer_defaults={"max_epochs": 10, "use_distributed_sampler": False, "enable_model_summary": False},
            seed_everything_default=0,
            parser_class=TrainParser,
            parser_kwargs={
                "allow_abbrev": False,  # `--max_epoch` is a mistake to point out, not to guess at
                "usage": "train.py [--config FILE] [flags]",
                "description": "Train an image classifier, test its best checkpoint, and sum up.",
            },
            args=args,  # type: ignore[arg-type]
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our own flags, and hand on what the network must know of the data."""
        for flag, (kind, default, text) in OWN_FLAGS.items():
            how = {"action": "store_true"} if kind is bool else {"type": kind}
            parser.add_argument(f"--{flag}", default=default, help=text, **how)
        parser.set_defaults({"model.network": {"class_path": "project.model.networks.ConvNet"}})
        data, model = (signature(c).parameters for c in (self._datamodule_class, self._model_class))
        if "seed" in data:
            parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        if "image_size" in data:
            parser.link_arguments("data.image_size", "model.network.init_args.image_size")
        if hasattr(self._datamodule_class, "num_classes"):
            parser.link_arguments("data.num_classes", "model.network.init_args.num_classes", apply_on="instantiate")
            if "num_classes" in model:
                parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and check the seed, which is used before anything else."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            self.config = parser.parse_args(given)
            self.continuation = self._find_continuation(self.config)
        except UsageError:  # settings of a network or an optimizer that only the checkpoint names?
            if not any(arg.startswith("--resume") for arg in given):
                raise
            alone = parser.parse_args([arg for flag in ("resume", "name", "log_dir") for arg in flag_of(flag, given)])
            self.continuation = self._find_continuation(alone)
            if not self.continuation.config:
                raise
        if self.continuation.config:  # what the command line does not say is as it was, but for the hardware
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "config.yaml")
                file.write_text(base_of(self.continuation.config, given))
                self.config = parser.parse_args(["--config", str(file), *given])
            self.config.pop("config", None)
            run = self.continuation.run
            if run is not None and flag_of("name", given) and self.config.name != run.parent.name:
                raise UsageError(
                    f"--name {self.config.name}: {run} is a run of {run.parent.name} and stays there; leave --name out,"
                    " or give --resume one of its .ckpt files, to begin a new run"
                )
            most, done = self.config.trainer.max_epochs, self.continuation.epochs
            if most is not None and 0 <= most < done:
                raise UsageError(
                    f"--max_epochs {most}: {self.continuation.checkpoint} has done {done} already; give at least {done}"
                )
            if self.continuation.checkpoint is not None:
                flags = {setting: flag for flag, (setting, _) in SHORT_FLAGS.items()}
                now = parser.dump(self.config, skip_unset=False)
                check_same(self.continuation.config, now, self.continuation.checkpoint, flags)
        seed = self.config.seed_everything
        if isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise UsageError(f"--seed {seed} must be a whole number from 0 to {2**32 - 1}")

    def _find_continuation(self, config: Namespace) -> Continuation:
        """Return what to go on from: a restarted job's own run, or what `--resume` says."""
        log_dir, name, resume, wait = config.log_dir, config.name, config.resume, config.timeout
        if own := stop_signal.agree_on("run", lambda: str(run_of_this_job(log_dir, name) or ""), wait):
            return in_directory(Path(own))

        def wanted() -> str:
            return resume if isinstance(resume, str) else str(newest_run(log_dir, name) or "") if resume else ""

        if isinstance(resume, str):
            if re.match(r"\w+:/", resume):
                raise UsageError(
                    f"--resume {resume} is a URL, and checkpoints are files on disk; download it, if you trust it"
                )
            if not resume:
                raise UsageError("--resume '' is no path; give a run directory or a .ckpt file, or --resume alone")
        if not (agreed := stop_signal.agree_on("resume", wanted, wait)):
            return NEW_RUN
        path = expanded(agreed)
        # One that was found is a run, be it without a checkpoint; so is what our launcher hands on, having found it.
        found = not isinstance(resume, str) or LAUNCHED_BY_US in os.environ
        return in_directory(path) if found and path.is_dir() else from_path(path)

    def before_instantiate_classes(self) -> None:
        """Check the hardware flags before anything is built; where they want several processes, start them, and end."""
        trainer = self.config.trainer
        if self.config.timeout <= 0:
            raise UsageError(f"--timeout {self.config.timeout} must be more than 0 seconds")
        if self.config.checkpoint_every < 0:
            raise UsageError(f"--checkpoint_every {self.config.checkpoint_every} must be at least 0")
        if trainer.overfit_batches:
            raise UsageError(
                f"--trainer.overfit_batches {trainer.overfit_batches} would replace the sampler; use"
                " --trainer.limit_train_batches, with --data.shift 0 --data.flip false"
            )
        _check_rate_finder(trainer.callbacks)
        if self.config.quiet and not self.config.explain:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        by_name = isinstance(trainer.strategy, str)
        if self.config.explain and not (by_name and isinstance(trainer.accelerator, str)):
            raise UsageError("--explain: give --strategy and --accelerator by name")
        self.hardware: Hardware | None = None  # None for an accelerator of the user's own class
        if isinstance(trainer.accelerator, str):
            strategy = trainer.strategy if by_name else "auto"  # a class is taken to use all devices
            trainer.devices, trainer.num_nodes = as_launched(trainer.devices, trainer.num_nodes, strategy)
            hardware = check_hardware(trainer.accelerator, trainer.devices, strategy, trainer.num_nodes)
            if hardware.missing and not self.config.explain:
                raise UsageError(hardware.missing)
            if hardware.strategy == "dp" and trainer.sync_batchnorm:
                raise UsageError("--trainer.sync_batchnorm true: DataParallel cannot do it; use --strategy ddp")
            if self.config.explain and hardware.family not in ("dp", "ddp", "single_device"):
                raise UsageError(f"--explain knows dp, ddp and a single device, not --strategy {hardware.strategy}")
            if not self.config.explain:
                check_launched(hardware)
            if hardware.num_nodes > 1:
                choose_network()
            batch_size = self.config.data.get("batch_size", 0)
            if batch_size > 0 and batch_size % hardware.world_size:
                raise UsageError(uneven_batch(batch_size, hardware.world_size))
            self.hardware = hardware
            if not hardware.on_gpu and self.config.compile and not self.config.explain:
                _check_compiler()
            if self._launches and by_name and hardware.is_launched and not self.config.explain:
                more = [f"--resume={self.continuation.run}"] if self.continuation.run else []
                sys.exit(launch(len(hardware.devices), hardware.num_nodes, more, self.config.timeout))

    def instantiate_classes(self) -> None:
        """Build everything; a value that a constructor refuses is the user's to mend."""
        try:
            super().instantiate_classes()
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(" ".join(str(error).split())) from error
        if self.hardware is not None and not self.hardware.on_gpu and self._is_command:
            keep_freed_memory(sum(p.numel() * p.element_size() for p in self.model.parameters()))
        if self.config.quiet:
            self.datamodule.quiet = True  # type: ignore[attr-defined]
        if self.config.compile and not self.config.explain:
            getattr(self.model, "network", self.model).compile()  # in place: no name in the state_dict changes

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer, with the run directory, its logger, checkpoints and record."""
        self.run_directory = self._run_directory()
        self.save_config_kwargs = {
            "run": self.run_directory,
            "notices": self.notices,
            "continuation": self.continuation,
        }
        if self.config.explain:
            return self._instantiate_for_one_forward_pass()
        config = self.config_init.trainer
        if config.logger is None or config.logger is True:
            kwargs["logger"] = RunLogger(self.run_directory)
        self.checkpoints = RunCheckpoints(self.config.checkpoint_every, warnings=self.notices.messages)
        self.checkpoints.resumed_from = self.resume_from
        self.checkpoints.in_place = self.continuation.run is not None
        board = Board(self.record, self.run_directory)
        kwargs["callbacks"] = [*_as_list(config.callbacks), self.record, board, LeanSteps()]
        if config.enable_checkpointing is not False:
            kwargs["callbacks"].append(self.checkpoints)
        self._say_what_it_resumes()
        if self._spawns:
            stop_signal.otherwise = "ended; a strategy that spawns saves nothing on a signal: see --checkpoint_every"
            _ = self.run_directory.path  # before the processes of fit and those of test each make one
        kwargs["plugins"] = [*_as_list(config.plugins), DurableCheckpointIO()]
        if not any(isinstance(p, ClusterEnvironment) for p in kwargs["plugins"]):
            kwargs["plugins"] += cluster_plugins()
        bar = config.enable_progress_bar
        kwargs["enable_progress_bar"] = sys.stdout.isatty() if bar is None else bar and not self.config.quiet
        if kwargs["enable_progress_bar"] and not any(isinstance(c, BaseProgressBar) for c in kwargs["callbacks"]):
            kwargs["callbacks"].append(ProgressBar(self.record))
        if config.profiler is None:
            kwargs["profiler"] = NoProfiler()
        if config.default_root_dir is None:
            kwargs["default_root_dir"] = self.config.log_dir
        if self.hardware is not None and self.hardware.strategy == "ddp" and isinstance(config.strategy, str):
            kwargs["strategy"] = DDPStrategy(
                gradient_as_bucket_view=True,  # gradients are not kept, and copied, twice
                timeout=timedelta(seconds=self.config.timeout),
            )
        return self._instantiate(**kwargs)

    def _run_directory(self) -> RunDirectory:
        run, config = self.continuation.run, self.config
        if run is not None:
            config.log_dir, config.name = str(run.parent.parent), run.parent.name
        return RunDirectory(config.log_dir, config.name, run)

    def _say_what_it_resumes(self) -> None:
        found = self.continuation
        for text in found.damaged:
            warnings.warn(text, stacklevel=2)
        if rank_zero_only.rank:  # type: ignore[attr-defined]
            return
        if found.checkpoint is not None:
            print(f"resume: from step {found.step}, {found.checkpoint}", flush=True)
        elif found.run is not None:
            print(
                f"resume: {found.run} has no checkpoint yet, so from its first step, set as its config.yaml says", flush=True
            )
        elif self.config.resume:
            print(f"resume: no run {self.config.name} in {self.config.log_dir} yet, so this is a new one", flush=True)

    def _instantiate(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise UsageError(" ".join(str(error).split())) from error

    def _instantiate_for_one_forward_pass(self) -> Trainer:
        assert self.hardware is not None
        if lacking(self.hardware):
            return cast(Trainer, None)  # what is not here cannot be tried
        self.save_config_callback = None
        return self._instantiate(
            logger=False,
            callbacks=[ShowShapes()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            fast_dev_run=False,
            limit_predict_batches=1,
        )

    @property
    def _spawns(self) -> bool:
        """Whether the strategy starts its processes from within this one, which computes nothing."""
        return self.hardware is not None and self.hardware.world_size > 1 and not self.hardware.is_launched

    def explain(self) -> None:
        """Print the plan, on rank 0, and the shapes of one forward pass, where this machine can make it."""
        assert self.hardware is not None
        first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if first:
            run, found = self.run_directory, self.continuation
            resumes = f"from step {found.step}, {found.checkpoint}" if found.checkpoint else ""
            if self.config.resume and not found.checkpoint:
                resumes = (
                    "from its first step: it has no checkpoint yet" if found.run else "nothing: there is no run of this name"
                )
            lines = plan(self.config, self.hardware, self.model, self.datamodule, run, sys.argv, resumes)
            print("\n".join(lines), flush=True)
        if lacking(self.hardware):
            if first:
                print("No forward pass, which this machine could not make.")
            return
        if first:
            print("One forward pass, of blank images:", flush=True)
        batch_size = self.config.data.get("batch_size", 64) // self.hardware.world_size
        images = blank_batch(batch_size, self.config.data.get("image_size", 32))
        self.trainer.predict(self.model, images, return_predictions=False)
        self.leave()

    @property
    def resume_from(self) -> str | None:
        """The checkpoint to continue, if there is one."""
        return str(self.continuation.checkpoint) if self.continuation.checkpoint is not None else None

    @property
    def best_checkpoint(self) -> str | None:
        """The checkpoint to test: the best, the last where nothing was validated, or none where none was kept."""
        return self.checkpoints.best_model_path or self.checkpoints.last_model_path or None

    def summarise(self) -> None:
        """Write `summary.json`, the HPARAMS row and the closing lines, on rank 0, and leave the process group."""
        if self._spawns:  # the run was in other processes; what it came to is in its last checkpoint
            self.datamodule.setup("test")
            last = self.run_directory.path / "checkpoints" / "last.ckpt"
            if last.exists():
                self.checkpoints.last_model_path = str(last)
                self.record.take_over(read_checkpoint(last, mmap=True)["record"])
        if self.trainer.is_global_zero:
            strategy = self.config.trainer.strategy
            name = (
                self.hardware.strategy
                if self.hardware and isinstance(strategy, str)
                else type(self.trainer.strategy).__name__
            )
            summary = summarise(self.trainer, self.datamodule, self.record, self.checkpoints, name, self.notices.messages)
            write_summary(summary, self.run_directory.path)
            self._write_hparams(summary)
            print("\n".join(closing_lines(summary, num_replicas(self.trainer), self.run_directory)), flush=True)
        self.leave()

    @staticmethod
    def leave() -> None:
        """Leave the process group, if there is one; Lightning would, but at the program's end and for nccl alone."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # step 16: clean up

    def _write_hparams(self, summary: dict[str, Any]) -> None:
        config = self.config.clone()
        config.data.source = summary["dataset"]
        settings = {name: value for name, value in vars(config.as_flat()).items() if name not in FREE and value is not None}
        metrics = {
            f"hparams/{name}": summary[name]
            for name in ("val_accuracy", "test_accuracy", "test_loss")
            if summary[name] is not None
        }
        for logger in self.trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.log_hyperparams(settings, metrics, step=self.trainer.global_step)
                logger.save()


def _check_rate_finder(callbacks: Any) -> None:
    for callback in _as_list(callbacks):
        finds = str(callback.get("class_path", "")).endswith(".LearningRateFinder") if hasattr(callback, "get") else False
        if finds and (callback.get("init_args") or {}).get("update_attr", True):
            raise UsageError(
                "--trainer.callbacks LearningRateFinder would set a rate that the schedule then replaces; add"
                " --trainer.callbacks.update_attr=false, read what it suggests in TensorBoard, and give that to --lr"
            )


def _check_compiler() -> None:
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(shutil.which(compiler) for compiler in named or ("g++", "clang++")):
        raise UsageError(
            f"--compile needs a C++ compiler, and {' '.join(named) or 'g++'} is not there; install it, name another"
            " in CXX, or leave --compile out"
        )


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, Iterable) else [value]

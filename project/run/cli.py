"""The command line: LightningCLI, with short flags, one-line errors, and everything a run writes."""

import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as BaseProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from project.data.datamodule import uneven_batch
from project.errors import UsageError
from project.run.callbacks import ProgressBar, RunRecord
from project.run.checkpoints import RunCheckpoints
from project.run.checks import Hardware, check_hardware, nearest
from project.run.exit import LAUNCHED_BY_US
from project.run.launch import launch, launched_from_outside, meet_again
from project.run.lean import LeanSteps, NoProfiler
from project.run.memory import keep_freed_memory
from project.run.notices import Notices
from project.run.outputs import RunDirectory, RunLogger, SaveConfig, expanded, newest_run, restarted_job
from project.run.plan import ShowShapes, blank_batch, lacking, plan
from project.run.resume import Continuation, base_of, check_same, from_path, in_directory
from project.run.signals import stop_signal
from project.run.storage import DurableCheckpointIO, read_checkpoint
from project.run.summary import closing_lines, num_replicas, summarise, write_summary

# Flag, the setting it stands for, and what it does in plain words. `--devices 2` and `--trainer.devices 2` are the same.
SHORT_FLAGS = {
    "accelerator": ("trainer.accelerator", "what computes: cpu, gpu, or auto for the GPU if there is one"),
    "devices": ("trainer.devices", "how many GPUs, or how many processes on the CPU; on GPUs also which, as 0,2"),
    "strategy": (
        "trainer.strategy",
        "how devices share the work: ddp, a process for each; dp, one process for all",
    ),
    "num_nodes": ("trainer.num_nodes", "how many machines take part"),
    "precision": ("trainer.precision", "arithmetic: 32-true, or bf16-mixed where the processor has it, for speed"),
    "max_epochs": ("trainer.max_epochs", "how often every training image is seen"),
    "batch_size": ("data.batch_size", "images per training step, over all devices together"),
    "seed": ("seed_everything", "decides initial weights, validation split, order of images and augmentation"),
    "optimizer": ("model.optimizer", "the optimizer, such as SGD or Adam; its settings as --optimizer.weight_decay"),
    "lr": ("model.optimizer.lr", "the optimizer's learning rate; with OneCycle, the highest"),
    "lr_scheduler": ("model.lr_scheduler", "the learning-rate schedule, such as OneCycle; null for a constant rate"),
}
OWN_FLAGS: dict[str, tuple[Any, Any, str]] = {
    "name": (str, "default", "what the run is called: it writes to <log_dir>/<name>/version_<n>"),
    "log_dir": (str, "logs", "the folder of all runs"),
    "checkpoint_every": (int, 0, "optimizer steps from one last.ckpt to the next; 0 saves at the end of every epoch"),
    "compile": (bool, False, "compile the network with torch.compile: half a minute at the start, for speed in a long run"),
    "resume": (
        bool | str,
        False,
        "go on with the newest run of this name where it stopped, or with a run directory; a checkpoint begins a new run",
    ),
    "explain": (bool, False, "say what the command would do, show one forward pass, and train nothing"),
}


# How jsonargparse says that a YAML file or a flag has a key it does not know: its group, where it names one, and the key.
UNKNOWN_SETTING = (
    r"""(?:Group '(\w+)' does not accept option|Key|Option) ["']([\w.]+)["'](?: is not (?:expected|accepted)|$)"""
)


class FlagParser(LightningArgumentParser):
    """Lightning's parser, with the short flags, and errors that are one line and name what was probably meant."""

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """Parse after spelling the short flags out."""
        given = sys.argv[1:] if args is None else args
        spelt_out = [self._long_form(arg) for arg in given]
        for place, arg in enumerate(spelt_out):
            if arg == "--resume" and (place + 1 == len(spelt_out) or spelt_out[place + 1].startswith("-")):
                spelt_out[place] = "--resume=true"
        return super().parse_args(spelt_out, *more, **kwargs)

    def format_help(self, *args: Any) -> str:
        """Put the short flags first."""
        usage, _, rest = super().format_help(*args).partition("options:")
        flags = {flag: text for flag, (_, text) in SHORT_FLAGS.items()} | {f: text for f, (*_, text) in OWN_FLAGS.items()}
        width = max(map(len, flags)) + 4
        lines = [f"  --{flag:<{width}}{text}" for flag, text in flags.items()]
        return "\n".join([f"{usage}flags:", *lines, "", "everything else:"]) + rest

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a UsageError of one line."""
        text = " ".join(message.split())
        if unknown := re.match(r"unrecognized arguments: (--?[^\s=]+)", text):
            raise UsageError(self._unknown(unknown[1], "flag", self._flags())) from ex
        if unknown := re.search(UNKNOWN_SETTING, text):
            settings = list(self.get_defaults(skip_validation=True).keys())
            ends = [setting.rpartition(".")[2] for setting in settings]
            group = f"{unknown[1]}." if unknown[1] else ""
            raise UsageError(self._unknown(group + unknown[2], "setting", settings + ends)) from ex
        text = re.sub(r'^Parser key "([\w.]+)":', r"--\1:", text)
        if choices := re.findall(r"Literal\[(.*?)\]", text):
            names = dict.fromkeys(name.strip(" '") for names in choices for name in names.split(","))
            given = text.rpartition("value: ")[2]
            hint = nearest(given, names)
            text = f"{text.partition(':')[0]} {given} is not one of {', '.join(names)}"
            text += f"; did you mean {hint}?" if hint else ""
        if wrong := re.search(r"Expected a dot import path string: (--\S+ .+)", text):
            text = f"{wrong[1]} is not a value that it can have"
        elif missing := re.search(r"Expected a dot import path string: (\S+)", text):
            text = f"{text.partition(':')[0]} {missing[1]} is not a class that can be imported; check its name"
        text = re.sub(r"Expected an? <class '(\w+)'>\. Got value: (.*)", r"expected \1, got \2", text)
        raise UsageError(text) from ex

    @staticmethod
    def _long_form(arg: str) -> str:
        match = re.match(r"--(\w+)(.*)", arg, re.DOTALL)
        return f"--{SHORT_FLAGS[match[1]][0]}{match[2]}" if match and match[1] in SHORT_FLAGS else arg

    def _flags(self) -> list[str]:
        long_forms = [option for action in self._actions for option in action.option_strings]
        return [*(f"--{short}" for short in SHORT_FLAGS), *long_forms]

    @staticmethod
    def _unknown(word: str, what: str, known: Iterable[str]) -> str:
        hint = nearest(word, known)
        return f"{word} is not a {what}" + (f"; did you mean {hint}?" if hint else "; --help lists them")


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
        self._is_command = args is None
        self._launches = self._is_command and not launched_from_outside()
        self._store = meet_again()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            stop_signal.join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self.notices = Notices()
        self.notices.install()
        self.record = RunRecord()
        super().__init__(
            model_class,
            datamodule_class,
            save_config_callback=SaveConfig,
            trainer_defaults={"max_epochs": 10, "use_distributed_sampler": False, "enable_model_summary": False},
            seed_everything_default=0,
            parser_class=FlagParser,
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
        log_dir, name, resume, job = config.log_dir, config.name, config.resume, restarted_job()
        if job and (own := stop_signal.agree_on("run", lambda: str(newest_run(log_dir, name, job) or ""))):
            return in_directory(Path(own))
        if isinstance(resume, str):
            if re.match(r"\w+:/", resume):
                raise UsageError(
                    f"--resume {resume} is a URL, and checkpoints are files on disk; download it, if you trust it"
                )
            if not resume:
                raise UsageError("--resume '' is no path; give a run directory or a .ckpt file, or --resume alone")
            path = expanded(resume)
            # What the launcher hands on is a run that it has found itself, be it without a checkpoint.
            return in_directory(path) if LAUNCHED_BY_US in os.environ and path.is_dir() else from_path(path)
        if resume and (newest := stop_signal.agree_on("newest run", lambda: str(newest_run(log_dir, name) or ""))):
            return in_directory(Path(newest))
        return Continuation(None, None)

    def before_instantiate_classes(self) -> None:
        """Check the hardware flags before anything is built; where they want several processes, start them, and end."""
        trainer = self.config.trainer
        if self.config.checkpoint_every < 0:
            raise UsageError(f"--checkpoint_every {self.config.checkpoint_every} must be at least 0")
        if trainer.overfit_batches:
            raise UsageError(
                f"--trainer.overfit_batches {trainer.overfit_batches} would replace the sampler; use"
                " --trainer.limit_train_batches, with --data.shift 0 --data.flip false"
            )
        by_name = isinstance(trainer.strategy, str)
        if self.config.explain and not (by_name and isinstance(trainer.accelerator, str)):
            raise UsageError("--explain: give --strategy and --accelerator by name")
        self.hardware: Hardware | None = None  # None for an accelerator of the user's own class
        if isinstance(trainer.accelerator, str):
            strategy = trainer.strategy if by_name else "auto"  # a class is taken to use all devices
            hardware = check_hardware(trainer.accelerator, trainer.devices, strategy, trainer.num_nodes)
            if hardware.missing and not self.config.explain:
                raise UsageError(hardware.missing)
            if hardware.strategy == "dp" and trainer.sync_batchnorm:
                raise UsageError("--trainer.sync_batchnorm true: DataParallel cannot do it; use --strategy ddp")
            if self.config.explain and hardware.family not in ("dp", "ddp", "single_device"):
                raise UsageError(f"--explain knows dp, ddp and a single device, not --strategy {hardware.strategy}")
            batch_size = self.config.data.get("batch_size", 0)
            if batch_size > 0 and batch_size % hardware.world_size:
                raise UsageError(uneven_batch(batch_size, hardware.world_size))
            self.hardware = hardware
            if not hardware.on_gpu and self.config.compile and not self.config.explain:
                _check_compiler()
            if self._launches and by_name and hardware.is_launched and not self.config.explain:
                more = [f"--resume={self.continuation.run}"] if self.continuation.run else []
                sys.exit(launch(len(hardware.devices), hardware.num_nodes, more))

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
        if self.config.compile and not self.config.explain:
            getattr(self.model, "network", self.model).compile()  # in place: no name in the state_dict changes

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer, with the run directory, its logger, checkpoints and record."""
        self.run_directory = self._run_directory()
        self.save_config_kwargs = {
            "run": self.run_directory,
            "notices": self.notices,
            "first_step": self.continuation.step,
        }
        if self.config.explain:
            return self._instantiate_for_one_forward_pass()
        config = self.config_init.trainer
        if config.logger is None or config.logger is True:
            kwargs["logger"] = RunLogger(self.run_directory)
        self.checkpoints = RunCheckpoints(self.config.checkpoint_every, warnings=self.notices.messages)
        self.checkpoints.resumed_from = self.resume_from
        self.checkpoints.in_place = self.continuation.run is not None
        kwargs["callbacks"] = [*_as_list(config.callbacks), self.record, LeanSteps()]
        if config.enable_checkpointing is not False:
            kwargs["callbacks"].append(self.checkpoints)
        self._say_what_it_resumes()
        if self._spawns:
            stop_signal.otherwise = "ended; a strategy that spawns saves nothing on a signal: see --checkpoint_every"
            _ = self.run_directory.path  # before the processes of fit and those of test each make one
        kwargs["plugins"] = [*_as_list(config.plugins), DurableCheckpointIO()]
        if SLURMEnvironment.detect() and not any(isinstance(p, ClusterEnvironment) for p in kwargs["plugins"]):
            # Lightning's own checkpoint for a requeued job would be taken up by every other run of the same log_dir.
            kwargs["plugins"].append(SLURMEnvironment(auto_requeue=False))
        bar = config.enable_progress_bar
        kwargs["enable_progress_bar"] = sys.stdout.isatty() if bar is None else bar
        if kwargs["enable_progress_bar"] and not any(isinstance(c, BaseProgressBar) for c in kwargs["callbacks"]):
            kwargs["callbacks"].append(ProgressBar())
        if config.profiler is None:
            kwargs["profiler"] = NoProfiler()
        if config.default_root_dir is None:
            kwargs["default_root_dir"] = self.config.log_dir
        if self.hardware is not None and self.hardware.strategy == "ddp" and isinstance(config.strategy, str):
            kwargs["strategy"] = DDPStrategy(gradient_as_bucket_view=True)  # gradients are not kept, and copied, twice
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
        if rank_zero_only.rank:
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
        first = rank_zero_only.rank == 0
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
        settings = vars(config.as_flat())
        metrics = {
            f"hparams/{name}": summary[name]
            for name in ("val_accuracy", "test_accuracy", "test_loss")
            if summary[name] is not None
        }
        for logger in self.trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.log_hyperparams(settings, metrics, step=self.trainer.global_step)
                logger.save()


def flag_of(name: str, given: Sequence[str]) -> list[str]:
    """Return a flag and its value as they stand on a command line; nothing where they do not."""
    for place, arg in enumerate(given):
        if arg.startswith(f"--{name}="):
            return [arg]
        if arg == f"--{name}":
            return [arg, *(value for value in given[place + 1 : place + 2] if not value.startswith("-"))]
    return []


def _check_compiler() -> None:
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(shutil.which(compiler) for compiler in named or ("g++", "clang++")):
        raise UsageError(
            f"--compile needs a C++ compiler, and {' '.join(named) or 'g++'} is not there; install it, name another"
            " in CXX, or leave --compile out"
        )


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, Iterable) else [value]

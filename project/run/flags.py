"""The flags: short ones for what people type, help that begins with them, and mistakes told in one line."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from project.errors import UsageError
from project.run.checks import nearest

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
    "timeout": (float, 1800.0, "seconds to wait for the other ranks before the run ends for want of them"),
    "quiet": (bool, False, "print warnings and errors only"),
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


class OneLineParser(ArgumentParser):
    """A parser whose errors are one line and name what was probably meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a UsageError of one line."""
        text = " ".join(message.split())
        if unknown := re.match(r"unrecognized arguments: (--?[^\s=]+)", text):
            raise UsageError(self._unknown(unknown[1], "flag", self._flags())) from ex
        if missing := re.match(r"the following arguments are required: (\w+)", text):
            raise UsageError(f"{missing[1].upper()} is missing; {' '.join(self.format_usage().split())}") from ex
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

    def _flags(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    @staticmethod
    def _unknown(word: str, what: str, known: Iterable[str]) -> str:
        hint = nearest(word, known)
        return f"{word} is not a {what}" + (f"; did you mean {hint}?" if hint else "; --help lists them")


class TrainParser(OneLineParser, LightningArgumentParser):
    """Lightning's parser, with the short flags."""

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
        del flags["timeout"]  # rarely typed; the list is to be seen at a glance
        width = max(map(len, flags)) + 4
        lines = [f"  --{flag:<{width}}{text}" for flag, text in flags.items()]
        return "\n".join([f"{usage}flags:", *lines, "", "everything else:"]) + rest

    @staticmethod
    def _long_form(arg: str) -> str:
        match = re.match(r"--(\w+)(.*)", arg, re.DOTALL)
        return f"--{SHORT_FLAGS[match[1]][0]}{match[2]}" if match and match[1] in SHORT_FLAGS else arg

    def _flags(self) -> list[str]:
        return [*(f"--{short}" for short in SHORT_FLAGS), *super()._flags()]


def flag_of(name: str, given: Sequence[str]) -> list[str]:
    """Return a flag and its value as they stand on a command line; nothing where they do not."""
    for place, arg in enumerate(given):
        if arg.startswith(f"--{name}="):
            return [arg]
        if arg == f"--{name}":
            return [arg, *(value for value in given[place + 1 : place + 2] if not value.startswith("-"))]
    return []


def timeout_of(given: Sequence[str]) -> float:
    """Return the seconds of `--timeout`, for what waits before the command line is parsed."""
    _, _, value = "=".join(flag_of("timeout", given)).partition("=")
    try:
        return min(max(1.0, float(value)), 1e6)
    except ValueError:  # none, or a mistake, which the parser will tell
        return float(OWN_FLAGS["timeout"][1])

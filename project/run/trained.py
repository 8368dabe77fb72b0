"""A trained network out of a checkpoint, without a Trainer: its weights, its classes, and what its images go through."""

import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from torch import nn

from project.errors import UsageError
from project.own import lies_in_this_clone
from project.run.storage import read_checkpoint

OF_THE_IMAGES = ("class_names", "image_size", "mean", "std")  # what a data module's state_dict must tell

# Modules that have nothing but networks and their parts: to name one of them does nothing but build it.
NETWORKS_ONLY = ("torch.nn.", "torchvision.models.", "torchvision.ops.")


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes:
        path: The checkpoint.
        network: The network, on the CPU, in evaluation mode, with the checkpoint's weights. Maps images, float
            (B, 3, S, S), normalised, to logits (B, K).
        network_class: Its class, as an import path.
        network_arguments: What it was made with, `num_classes` and `image_size` among it where it takes them.
        class_names: K names, in the order of the logits.
        image_size: S, in pixels.
        mean: Of red, green and blue, in 0..1; pixels / 255 have it subtracted.
        std: The same, and are divided by it.
        source: What the images were, as `--data.source` names it.
        optimizer_steps: How many it was trained for.
    """

    path: Path
    network: nn.Module
    network_class: str
    network_arguments: dict[str, Any]
    class_names: list[str]
    image_size: int
    mean: list[float]
    std: list[float]
    source: str
    optimizer_steps: int


def checkpoint_in(given: str) -> Path:
    """Return the checkpoint that a path stands for: itself, or a run directory's best, else its last.

    Raises:
        UsageError: There is none.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        for name in ("best.ckpt", "last.ckpt"):
            for folder in (path / "checkpoints", path):
                if (folder / name).is_file():
                    return folder / name
        raise UsageError(f"{given} holds no checkpoint; give a .ckpt file, or a run directory, <log_dir>/<name>/version_<n>")
    if not path.is_file():
        raise UsageError(f"{given} is not there; give a .ckpt file, or a run directory, <log_dir>/<name>/version_<n>")
    return path


def read_settings(path: Path, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's settings, as its config.yaml has them, and what its data module tells of the images.

    Raises:
        UsageError: It has none: it is not one of this template's.
    """
    config = checkpoint.get("run", {}).get("config", "") if isinstance(checkpoint, dict) else ""
    states = [value for value in checkpoint.values() if isinstance(value, dict)] if config else []
    images = next((state for state in states if set(OF_THE_IMAGES) <= state.keys()), None)
    if images is None:
        raise UsageError(
            f"{path} does not say what its network and images are; give a checkpoint that scripts/train.py has saved"
        )
    return yaml.safe_load(config), images


def load_trained(path: Path) -> Trained:
    """Build the network of a checkpoint anew, and give it the weights.

    Raises:
        UsageError: The file is no checkpoint of this template's, is damaged, or its network cannot be built here.
    """
    checkpoint = read_checkpoint(path)
    settings, images = read_settings(path, checkpoint)
    name, arguments = _network_of(path, settings, images)
    prefix = "network."
    weights = {key.removeprefix(prefix): value for key, value in checkpoint["state_dict"].items() if key.startswith(prefix)}
    network = _build(path, name, arguments)
    floating = next((value.dtype for value in weights.values() if value.is_floating_point()), torch.float32)
    network.to(floating).to(memory_format=torch.channels_last)  # as it was trained; its arithmetic depends on both
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UsageError(
            f"{path}: its weights do not fit {name} as it is here ({' '.join(str(error).split())[:300]});"
            " use the code that it was trained with"
        ) from error
    return Trained(
        path=path,
        network=network.eval(),
        network_class=name,
        network_arguments=arguments,
        class_names=list(images["class_names"]),
        image_size=int(images["image_size"]),
        mean=list(images["mean"]),
        std=list(images["std"]),
        source=str(images.get("source", "")),
        optimizer_steps=int(checkpoint["global_step"]),
    )


def _network_of(path: Path, settings: dict[str, Any], images: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the class of the network and its arguments, with those that the command line took from the data."""
    network = settings.get("model", {}).get("network", {})
    name = network.get("class_path") if isinstance(network, dict) else None
    if not name:
        raise UsageError(f"{path} does not name its network; give a checkpoint that scripts/train.py has saved")
    module, _, attribute = name.rpartition(".")
    if not _is_ours(module):  # to import a module runs it, whatever it is
        raise UsageError(
            f"{path}: its network, {name}, is not taken from a checkpoint's word: only what lies in this clone, in a"
            " module or a package with an __init__.py, or in torch.nn or torchvision.models, is"
        )
    try:
        found = getattr(__import__(module, fromlist=[attribute]), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{path}: its network, {name}, cannot be imported ({error}); run this in the clone that trained it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UsageError(f"{path}: its network, {name}, is no network: no torch.nn.Module")
    arguments = dict(network.get("init_args") or {})
    _check_arguments(path, arguments)
    known = inspect.signature(found).parameters
    for argument, value in (("num_classes", len(images["class_names"])), ("image_size", images["image_size"])):
        if argument in known:
            arguments[argument] = value
    return name, arguments


def _is_ours(module: str) -> bool:
    """Return whether a module lies in this clone, or where there are nothing but networks."""
    return f"{module}.".startswith(NETWORKS_ONLY) or lies_in_this_clone(module)


def _check_arguments(path: Path, value: Any) -> None:
    """Refuse an argument that names what is not ours: to build the network would import it."""
    if isinstance(value, dict):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = ()
        if isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
            module = value.rpartition(".")[0]
            if not _is_ours(module) and importlib.util.find_spec(module.partition(".")[0]) is not None:
                raise UsageError(
                    f"{path}: {value}, an argument of its network, is not taken from a checkpoint's word: only what lies in"
                    " this clone, in a package with an __init__.py, or in torch.nn or torchvision.models, is"
                )
    for part in parts:
        _check_arguments(path, part)


def _build(path: Path, name: str, arguments: dict[str, Any]) -> nn.Module:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "network")
    try:
        settings = parser.parse_object({"network": {"class_path": name, "init_args": arguments}})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # between versions of jsonargparse
            network: nn.Module = parser.instantiate_classes(settings).network
            return network
    except UsageError:
        raise
    except Exception as error:  # whatever a constructor of the user's raises
        raise UsageError(f"{path}: its network, {name}, cannot be built ({' '.join(str(error).split())[:300]})") from error

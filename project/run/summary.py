"""What a run came to: `summary.json`, and the same in words."""

import json
import platform
import shlex
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch import Trainer

from project.run.callbacks import RunRecord
from project.run.checkpoints import RunCheckpoints
from project.run.outputs import RunDirectory
from project.run.storage import write_durably

MOST_LINES = 12  # of the closing summary


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "lightning": lightning.__version__,
        "torchmetrics": torchmetrics.__version__,
    }


def summarise(
    trainer: Trainer, data: Any, record: RunRecord, checkpoints: RunCheckpoints, strategy: str, warnings: list[str]
) -> dict[str, Any]:
    """Return the figures of a finished run, in the order in which `summary.json` lists them.

    Accuracies are shares of 1; losses are mean cross-entropies; `images_per_second` counts training images over all
    devices, the time of validations left out; `best_epoch` counts from 0. What was not measured is None.
    """
    figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
    best_epoch, val_loss, val_accuracy = max(record.validations, key=lambda v: v[2], default=(None, None, None))
    return {
        "dataset": data.resolved_source,
        "num_train_images": len(data.train_positions),
        "num_val_images": len(data.val_positions),
        "num_test_images": len(data.test_positions),
        "test_is_split_off": getattr(data, "test_is_split_off", False),
        "num_test_images_counted": int(figures.get("test/num_images", 0)),
        "accelerator": "cpu" if trainer.strategy.root_device.type == "cpu" else "gpu",
        "strategy": strategy,
        "world_size": trainer.world_size,
        "global_batch_size": data.batch_size,
        "device_batch_size": -(-data.batch_size // num_replicas(trainer)),
        "optimizer_steps": record.num_steps,
        "epochs": record.num_epochs,
        "train_seconds": round(record.train_seconds, 3),
        "images_per_second": round(record.num_images / record.epoch_seconds, 1) if record.epoch_seconds else None,
        "val_loss": _rounded(val_loss),
        "val_accuracy": _rounded(val_accuracy),
        "test_loss": _rounded(figures.get("test/loss")),
        "test_accuracy": _rounded(figures.get("test/accuracy")),
        "best_epoch": best_epoch,
        "best_checkpoint": _kept(checkpoints.best_model_path),
        "last_checkpoint": _kept(checkpoints.last_model_path),
        "versions": versions(),
        "warnings": warnings,
    }


def num_replicas(trainer: Trainer) -> int:
    """Return how many devices compute: the processes, or, with dp, the GPUs of one."""
    return getattr(trainer.strategy, "num_replicas", trainer.world_size)


def _kept(path: str) -> str | None:
    return path if path and Path(path).exists() else None


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 6)


def write_summary(summary: dict[str, Any], folder: Path) -> None:
    """Write `summary.json` into a folder, whole or not at all."""
    write_durably(folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=2).encode() + b"\n"))


def closing_lines(summary: dict[str, Any], devices: int, run: RunDirectory) -> list[str]:
    """Return the summary in words, and what to type next: at most 12 lines."""
    s = summary
    where = f"{devices} x {s['accelerator']} ({s['strategy']})"
    checkpoint = s["best_checkpoint"] or s["last_checkpoint"]
    lines = [
        f"data      {s['dataset']}: {s['num_train_images']:,} training, {s['num_val_images']:,} validation, "
        f"{s['num_test_images']:,} test images" + (", split off: there is no test/" if s["test_is_split_off"] else ""),
        f"trained   {s['epochs']} epochs, {s['optimizer_steps']:,} steps of {s['global_batch_size']} images on {where}: "
        f"{s['train_seconds']:,.0f} s" + (f", {s['images_per_second']:,.0f} images/s" if s["images_per_second"] else ""),
    ]
    if s["best_epoch"] is not None:
        lines.append(
            f"validated accuracy {s['val_accuracy']:.4f}, loss {s['val_loss']:.4f}, best in epoch {s['best_epoch'] + 1}"
        )
    if s["test_accuracy"] is not None:
        lines.append(
            f"tested    accuracy {s['test_accuracy']:.4f}, loss {s['test_loss']:.4f}, "
            f"on {s['num_test_images_counted']:,} images, "
            + ("each counted once" if s["num_test_images_counted"] == s["num_test_images"] else "as limited")
        )
    lines += [f"saved     {checkpoint or 'no checkpoint'}", f"run       {run.path}"]
    following = [f"tensorboard --logdir {shlex.quote(str(run.log_dir))}"]
    if checkpoint:
        path = shlex.quote(checkpoint)
        following += [f"python scripts/evaluate.py {path}", f"python scripts/predict.py {path} IMAGE_OR_FOLDER"]
    lines += [f"{'next' if number == 0 else '':<10}{command}" for number, command in enumerate(following)]
    return _first(s["warnings"], MOST_LINES - len(lines)) + lines


def _first(warnings: list[str], most: int) -> list[str]:
    """Return so many lines of warnings; the last says how many more there are."""
    lines = [f"warning: {text}" for text in warnings]
    if len(lines) > most:
        lines[most - 1 :] = [f"warning: and {len(lines) - most + 1} more, above and in summary.json"]
    return lines

"""What a checkpoint's network makes of the test images: the figures, as text, JSON and a picture."""

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from project.data.folder import visible_folders
from project.errors import UsageError
from project.model.evaluation import Findings
from project.run.board import class_names
from project.run.storage import read_checkpoint
from project.run.summary import versions
from project.run.trained import Trained, read_settings


def data_settings(path: Path) -> tuple[dict[str, Any], list[str], Any]:
    """Return a checkpoint's `--data.*` settings, its classes, and its precision."""
    settings, images = read_settings(path, read_checkpoint(path, mmap=True))
    return settings.get("data", {}), list(images["class_names"]), settings.get("trainer", {}).get("precision")


def of_other_images(
    data: dict[str, Any], class_names: list[str], root_flag: list[str], trained: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings with which a folder that is not laid out for training is read: its test images are enough.

    Args:
        data: The `--data.*` settings.
        class_names: That the network knows.
        root_flag: `--data.root` as the command line has it; empty where it has none.
        trained: The `--data.*` settings of the training.

    Raises:
        UsageError: It is given, and would be passed over.
    """
    if data.get("source") != "folder":
        if root_flag and data.get("source") == "synthetic":
            raise UsageError(
                f"--data.root {data['root']}: synthetic images lie in no folder; add --data.source folder, or leave it out"
            )
        return data
    root = Path(data["root"])
    train, test = root / "train", root / "test"
    there = visible_folders(train)
    same_root = trained.get("source") == "folder" and root.resolve() == Path(trained["root"]).resolve()
    if there == set(class_names) or (same_root and not test.is_dir()):
        return data  # in the second case the training images lie there too: only those split off are scored
    flat = visible_folders(root)
    if not test.is_dir() and trained.get("source") == "folder" and flat <= set(class_names):
        warnings.warn(
            f"--data.root {root} has no test/: all its images are taken for test images. If the network was trained on some"
            f" of them, name the folder as the training did, {trained.get('root')}, or move them into {root}/train/",
            stacklevel=2,
        )
    return {**data, "class_names": class_names}


def evaluate(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, trained: Trained
) -> tuple[dict[str, Any], Findings]:
    """Test the network on every test image once.

    Returns:
        What `--json` writes, accuracies as shares of 1 and the loss as the mean cross-entropy, and the findings.
    """
    trainer.test(module, data, ckpt_path=str(trained.path), weights_only=True, verbose=False)
    findings: Findings | None = getattr(module, "findings", {}).get("test")
    if findings is None:
        raise UsageError(f"{type(module).__name__} leaves no findings of its test, as project.model.classifier does")
    figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
    names = class_names(trainer, len(findings.images_by_class))
    result = {
        "checkpoint": str(trained.path),
        "optimizer_steps": trained.optimizer_steps,
        "dataset": getattr(data, "resolved_source", type(data).__name__),
        "num_test_images": int(figures["test/num_images"]),
        "test_accuracy": round(figures["test/accuracy"], 6),
        "test_loss": round(figures["test/loss"], 6),
        "accuracy_by_class": {
            name: None if accuracy is None else round(accuracy, 6)
            for name, accuracy in zip(names, findings.accuracy_by_class, strict=True)
        },
        "images_by_class": dict(zip(names, findings.images_by_class, strict=True)),
        "confusion": None if findings.confusion is None else findings.confusion.tolist(),
        "accelerator": "cpu" if trainer.strategy.root_device.type == "cpu" else "gpu",
        "world_size": trainer.world_size,
        "precision": str(trainer.precision),
        "versions": versions(),
    }
    return result, findings


def as_lines(result: dict[str, Any]) -> list[str]:
    """Return the figures in words."""
    width = max(len("class"), *map(len, result["images_by_class"]))
    lines = [
        f"checkpoint  {result['checkpoint']}, step {result['optimizer_steps']:,}",
        f"images      {result['dataset']}: {result['num_test_images']:,} test images, each counted once",
        f"accuracy    {result['test_accuracy']:.4f}",
        f"loss        {result['test_loss']:.4f}",
        "",
        f"{'class':<{width}}  accuracy   images",
    ]
    for name, images in result["images_by_class"].items():
        accuracy = result["accuracy_by_class"][name]
        lines.append(f"{name:<{width}}  {'       -' if accuracy is None else f'{accuracy:8.4f}'} {images:8,}")
    return lines

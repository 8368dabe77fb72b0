"""What an evaluation finds out, every image counted once on any number of processes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassStatScores

from project.data.batches import IGNORE_INDEX

MOST_CLASSES = 500  # of a confusion matrix: it has their square


@dataclass(frozen=True)
class Mistakes:
    """Images that were classified wrongly, the surest first.

    Attributes:
        images: float32 (M, 3, H, W), as the network saw them.
        predicted: int64 (M,).
        labels: int64 (M,).
        confidences: The probability of the predicted class, float32 (M,).
    """

    images: Tensor
    predicted: Tensor
    labels: Tensor
    confidences: Tensor


@dataclass(frozen=True)
class Findings:
    """What an evaluation came to besides its loss and accuracy; the same on every rank, on the CPU.

    Attributes:
        accuracy_by_class: Share of each class's images that were classified correctly; None for a class without images.
        images_by_class: The number of images of each class.
        confusion: Images of each class (row) by the class predicted (column), int64 (K, K); None for over 500 classes.
        mistakes: The worst of them.
    """

    accuracy_by_class: list[float | None]
    images_by_class: list[int]
    confusion: Tensor | None
    mistakes: Mistakes


class WorstMistakes(Metric):
    """Keep the images that were classified wrongly with the highest confidence.

    Args:
        count: How many.
    """

    full_state_update = False
    images: list[Tensor]
    confidences: list[Tensor]
    classes: list[Tensor]  # predicted and true, int64 (count, 2)

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        for name in ("images", "confidences", "classes"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Take in a batch: float (B, 3, H, W), logits (B, K), int64 (B,)."""
        confidences, predicted = logits.softmax(dim=1).max(dim=1)
        wrong = (predicted != labels) & (labels != IGNORE_INDEX)
        worst, rows = torch.where(wrong, confidences, -1).topk(min(self.count, len(labels)))
        found = (images[rows].float(), worst, torch.stack([predicted[rows], labels[rows]], dim=1))
        if not self.confidences:  # as many rows on every rank, so that they can be gathered
            some = (images.new_zeros(self.count, *images.shape[1:]).float(), worst.new_full((self.count,), -1))
            before = (*some, labels.new_zeros(self.count, 2))
        else:
            before = (self.images[0], self.confidences[0], self.classes[0])
        all_images, all_confidences, classes = (torch.cat(pair) for pair in zip(before, found, strict=True))
        kept, rows = all_confidences.topk(self.count)
        self.images, self.confidences, self.classes = [all_images[rows]], [kept], [classes[rows]]

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the worst of all ranks: images (M, 3, H, W), classes, predicted and true, (M, 2), confidences (M,)."""
        images, confidences, classes = (
            torch.cat(list(state)) if isinstance(state, list) else state
            for state in (self.images, self.confidences, self.classes)
        )
        kept, rows = confidences.topk(self.count)
        rows = rows[kept > 0]
        return images[rows], classes[rows], confidences[rows]


class Evaluation(nn.Module):
    """Counts what a network makes of labelled images; an image with the label `IGNORE_INDEX` is not counted.

    Args:
        num_classes: Number of classes.
        num_mistakes: How many of the worst mistakes are kept.
    """

    def __init__(self, num_classes: int, num_mistakes: int = 16) -> None:
        super().__init__()
        settings: dict[str, Any] = {"ignore_index": IGNORE_INDEX, "validate_args": False}
        self.figures = nn.ModuleDict(
            {
                "loss": MeanMetric(nan_strategy=float("nan")),  # a loss that is not a number stays one
                "accuracy": MulticlassAccuracy(num_classes, average="micro", **settings),
                "num_images": SumMetric(),
            }
        )
        self.by_class = MulticlassStatScores(num_classes, average=None, **settings)
        self.confusion = MulticlassConfusionMatrix(num_classes, **settings) if num_classes <= MOST_CLASSES else None
        self.mistakes = WorstMistakes(num_mistakes)

    def _metric(self, name: str) -> Metric:
        metric = self.figures[name]
        assert isinstance(metric, Metric)
        return metric

    def update(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: float (B, 3, H, W), float32 (B, K), int64 (B,)."""
        count = (labels != IGNORE_INDEX).sum()
        loss = functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        self._metric("loss").update(loss / count.clamp(min=1), weight=count)
        self._metric("accuracy").update(logits, labels)
        self._metric("num_images").update(count)
        self.by_class.update(logits, labels)
        if self.confusion is not None:
            self.confusion.update(logits, labels)
        self.mistakes.update(images, logits, labels)

    def reset(self) -> None:
        """Forget all."""
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()

    def findings(self) -> Findings:
        """Return what was found, of all ranks, which must all ask; and forget that part of it."""
        scores = self.by_class.compute().tolist()  # of each class: true and false positives and negatives, images
        confusion = None if self.confusion is None else self.confusion.compute().cpu()
        images, classes, confidences = (part.cpu() for part in self.mistakes.compute())
        for metric in (self.by_class, self.confusion, self.mistakes):
            if metric is not None:
                metric.reset()
        return Findings(
            accuracy_by_class=[correct / images if images else None for correct, *_, images in scores],
            images_by_class=[images for *_, images in scores],
            confusion=confusion,
            mistakes=Mistakes(images, classes[:, 0], classes[:, 1], confidences.reshape(-1)),  # torchmetrics: () of one
        )

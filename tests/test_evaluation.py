"""What an evaluation finds out: the confusion matrix, each class's accuracy, and the worst mistakes."""

import pytest
import torch
from torch import Tensor

from project.data.batches import IGNORE_INDEX
from project.model.evaluation import MOST_CLASSES, Evaluation, Findings

NUM_CLASSES = 4


def evaluated(batches: list[tuple[Tensor, Tensor, Tensor]], num_mistakes: int = 5) -> Findings:
    evaluation = Evaluation(NUM_CLASSES, num_mistakes)
    for images, logits, labels in batches:
        evaluation.update(images, logits, labels)
    return evaluation.findings()


def some(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 4, 4, generator=stream)
    return images, 3 * torch.randn(count, NUM_CLASSES, generator=stream), torch.randint(3, (count,), generator=stream)


def test_it_counts_what_a_loop_counts_whatever_the_batches() -> None:
    images, logits, labels = some(50, 0)
    labels[7:11] = IGNORE_INDEX
    whole = evaluated([(images, logits, labels)])
    parts = evaluated([(images[rows], logits[rows], labels[rows]) for rows in torch.arange(50).split(3)])
    counted = [(int(label), int(row.argmax())) for row, label in zip(logits, labels, strict=True) if label >= 0]
    expected = [[counted.count((true, predicted)) for predicted in range(NUM_CLASSES)] for true in range(NUM_CLASSES)]
    for findings in (whole, parts):
        assert findings.confusion is not None
        assert findings.confusion.tolist() == expected
        assert findings.images_by_class == [sum(row) for row in expected]
        assert findings.images_by_class[3] == 0
        assert findings.accuracy_by_class[3] is None
        assert findings.accuracy_by_class[:3] == pytest.approx([expected[k][k] / sum(expected[k]) for k in range(3)])


def test_the_worst_mistakes_are_the_surest_wrong_ones_in_order() -> None:
    images, logits, labels = some(60, 1)
    labels[3] = IGNORE_INDEX
    logits[3] = torch.tensor([99.0, 0, 0, 0])  # sure, and not counted
    probabilities = logits.softmax(1)
    wrong = [n for n in range(60) if labels[n] >= 0 and probabilities[n].argmax() != labels[n]]
    worst = sorted(wrong, key=lambda n: -probabilities[n].max().item())[:5]
    for size in (60, 7, 2):
        mistakes = evaluated([(images[r], logits[r], labels[r]) for r in torch.arange(60).split(size)]).mistakes
        assert torch.equal(mistakes.images, images[worst])
        assert torch.equal(mistakes.labels, labels[worst])
        assert torch.equal(mistakes.predicted, probabilities[worst].argmax(1))
        assert torch.allclose(mistakes.confidences, probabilities[worst].amax(1))


@pytest.mark.parametrize("number_wrong", [0, 1])
def test_few_or_no_mistakes_are_all_there_are(number_wrong: int) -> None:
    labels = torch.tensor([0, 1, 2])
    logits = torch.eye(NUM_CLASSES)[[0, 1, 3 if number_wrong else 2]]
    mistakes = evaluated([(torch.zeros(3, 3, 4, 4), logits, labels)]).mistakes
    assert mistakes.labels.tolist() == [2] * number_wrong
    assert mistakes.predicted.tolist() == [3] * number_wrong
    assert mistakes.images.shape == (number_wrong, 3, 4, 4)


def test_it_begins_anew_after_its_findings() -> None:
    evaluation = Evaluation(NUM_CLASSES)
    evaluation.update(*some(9, 0))
    evaluation.findings()
    images, logits, labels = some(5, 1)
    evaluation.update(images, logits, labels)
    findings = evaluation.findings()
    assert findings.confusion is not None
    assert findings.confusion.sum() == 5
    assert len(findings.mistakes.labels) == (logits.argmax(1) != labels).sum()


def test_of_very_many_classes_there_is_no_matrix() -> None:
    evaluation = Evaluation(MOST_CLASSES + 1)
    evaluation.update(torch.zeros(2, 3, 4, 4), torch.eye(MOST_CLASSES + 1)[[1, 500]], torch.tensor([1, 2]))
    findings = evaluation.findings()
    assert findings.confusion is None
    assert findings.accuracy_by_class[:3] == [None, 1.0, 0.0]


def test_nothing_of_it_enters_a_checkpoint() -> None:
    assert not Evaluation(NUM_CLASSES).state_dict()

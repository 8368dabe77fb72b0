"""Augmentation depends on seed, epoch and image alone."""

import numpy as np
import pytest
import torch

from project.data.augment import Augmentation, mixed, seed_of

IMAGES = torch.randint(256, (40, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_each_image_is_a_window_of_its_reflection_mirrored_or_not() -> None:
    augment = Augmentation(40, shift=3, flip=True, seed=0)
    result = augment(IMAGES, torch.arange(40), epoch=2)
    shifts, flips = augment.draw(2)
    for image, augmented, (dy, dx), flip in zip(IMAGES, result, shifts.T.tolist(), flips.tolist(), strict=True):
        window = np.pad(image.numpy(), ((0, 0), (3, 3), (3, 3)), mode="reflect")[:, dy : dy + 12, dx : dx + 10]
        assert np.array_equal(augmented.numpy(), window[:, :, ::-1] if flip else window)


def test_the_batch_an_image_is_in_does_not_matter() -> None:
    augment = Augmentation(40, shift=3, flip=True, seed=0)
    whole = augment(IMAGES, torch.arange(40), epoch=5)
    some = torch.tensor([7, 39, 0, 21])
    assert torch.equal(Augmentation(40, 3, True, 0)(IMAGES[some], some, 5), whole[some])


@pytest.mark.parametrize(("seed", "epoch"), [(1, 0), (0, 1)])
def test_another_seed_or_epoch_is_another_augmentation(seed: int, epoch: int) -> None:
    first = Augmentation(40, 3, True, 0)(IMAGES, torch.arange(40), 0)
    assert not torch.equal(first, Augmentation(40, 3, True, seed)(IMAGES, torch.arange(40), epoch))


def test_all_shifts_occur_equally_often_and_half_are_mirrored() -> None:
    shifts, flips = Augmentation(90_000, shift=4, flip=True, seed=3).draw(0)
    counts = torch.stack([(shifts == value).sum(dim=1) for value in range(9)])
    assert shifts.min() == 0
    assert shifts.max() == 8
    assert (counts - 10_000).abs().max() < 500  # five standard deviations
    assert abs(flips.float().mean() - 0.5) < 0.01


def test_no_shift_and_no_flip_leave_the_image() -> None:
    assert torch.equal(Augmentation(40, 0, False, 0)(IMAGES, torch.arange(40), 0), IMAGES)


def test_where_mirroring_alternates_an_image_is_mirrored_in_every_other_epoch() -> None:
    first, second, third = (Augmentation(9000, 2, True, 0, alternate=True).draw(epoch) for epoch in range(3))
    assert torch.equal(second[1], ~first[1])
    assert torch.equal(third[1], first[1])
    assert abs(first[1].float().mean() - 0.5) < 0.03
    assert not torch.equal(first[0], second[0])  # the shifts are drawn anew
    assert not torch.equal(first[1], Augmentation(9000, 2, True, 1, alternate=True).draw(0)[1])


def test_the_seeds_of_a_sequence_are_splitmix64s() -> None:
    # The generator's published first outputs from the state 1234567.
    assert [mixed(1234567, number) for number in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_who_is_mirrored_first_is_drawn_from_no_other_stream() -> None:
    draws = Augmentation(200, 2, True, 7, alternate=True).draw(0)[1]
    for other in [(7, epoch, use) for epoch in range(20) for use in range(3)]:
        assert not torch.equal(torch.rand(200, generator=torch.Generator().manual_seed(seed_of(*other))) < 0.5, draws)

"""The data module: splits, scaling, and what the network is told."""

from pathlib import Path

import pytest
import torch

from project.data.datamodule import ImageDataModule
from project.data.split import split_by_class
from project.errors import UsageError
from tests.conftest import ImageFolder


def prepared(root: Path, cache: Path, **settings: object) -> ImageDataModule:
    data = ImageDataModule("folder", str(root), cache_dir=str(cache), **{"batch_size": 4, **settings})  # type: ignore[arg-type]
    data.prepare_data()
    data.setup()
    return data


def test_the_validation_split_is_stratified_seeded_and_disjoint() -> None:
    labels = torch.tensor([0] * 100 + [1] * 50 + [2] * 7 + [3])
    kept, split_off = split_by_class(labels, 0.2, seed=0)
    assert torch.bincount(labels[split_off], minlength=4).tolist() == [20, 10, 1, 0]
    assert torch.equal(torch.cat([kept, split_off]).sort().values, torch.arange(158))
    assert torch.equal(split_off, split_by_class(labels, 0.2, seed=0)[1])
    assert not torch.equal(split_off, split_by_class(labels, 0.2, seed=1)[1])


def test_a_folder_of_its_own_is_the_validation_set(image_folder: ImageFolder, tmp_path: Path) -> None:
    data = prepared(image_folder([6, 6], [2, 2], [3, 4]), tmp_path)
    assert (len(data.train_positions), len(data.val_positions)) == (12, 7)
    assert len(data.val_batches) == 7


def test_no_validation_on_request(image_folder: ImageFolder, tmp_path: Path) -> None:
    data = prepared(image_folder([6, 6], [2, 2]), tmp_path, val_fraction=0.0)
    assert len(data.train_positions) == 12
    assert data.val_dataloader() == []


def test_normalised_training_images_have_mean_zero_and_deviation_one(image_folder: ImageFolder, tmp_path: Path) -> None:
    data = prepared(image_folder([6, 6], [2, 2]), tmp_path)
    images = data.normalize_images(data.train_batches.images)
    assert images.dtype == torch.float32
    assert images.mean((0, 2, 3)).abs().max() < 1e-5
    assert (images.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_without_normalisation_pixels_are_divided_by_255_exactly(image_folder: ImageFolder, tmp_path: Path) -> None:
    data = prepared(image_folder([6, 6], [2, 2]), tmp_path, normalize=False)
    images = data.train_batches.images
    assert torch.equal(data.normalize_images(images), images.to(torch.float32).div(255))


def test_the_test_images_are_all_there_in_order(image_folder: ImageFolder, tmp_path: Path) -> None:
    data = prepared(image_folder([6, 6], [5, 6]), tmp_path, eval_batch_size=4)
    labels = torch.cat([labels for _, labels in data.test_dataloader()])
    assert labels.tolist() == [0] * 5 + [1] * 6 + [-100]


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_change_nothing(workers: int, image_folder: ImageFolder, tmp_path: Path) -> None:
    root = image_folder([30, 30], [2, 2])
    loader = prepared(root, tmp_path, num_workers=workers).train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        epochs.append(list(loader))
    reference = prepared(root, tmp_path).train_dataloader()
    for epoch in range(2):
        reference.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for (images, labels), (other_images, other_labels) in zip(epochs[epoch], reference, strict=True):
            assert torch.equal(images, other_images)
            assert torch.equal(labels, other_labels)


@pytest.mark.parametrize(
    "setting",
    [{"batch_size": 0}, {"image_size": 4}, {"shift": 32}, {"eval_batch_size": 0}, {"val_fraction": 1.0}, {"seed": -1}],
)
def test_a_setting_that_cannot_work_is_named(setting: dict) -> None:
    with pytest.raises(UsageError, match=f"--(data.)?{next(iter(setting))}"):
        ImageDataModule("synthetic", **setting)


def test_more_images_in_a_batch_than_there_are_is_an_error(image_folder: ImageFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--batch_size 64 is more than the 10 training images"):
        prepared(image_folder([6, 6], [2, 2]), tmp_path, batch_size=64, val_fraction=0.2)


def test_a_folder_of_images_is_not_taken_for_the_place_of_cifar10(image_folder: ImageFolder) -> None:
    with pytest.raises(UsageError, match=r"add --data\.source folder"):
        ImageDataModule("auto", str(image_folder([2, 2], [1, 1])))


def test_normalised_pixels_are_those_of_the_formula_to_the_last_bit(tmp_path: Path, image_folder: ImageFolder) -> None:
    data = prepared(image_folder([6, 6], [2, 2]), tmp_path)
    images = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    mean, std = (255 * torch.tensor(figures)[:, None, None] for figures in (data.mean, data.std))
    for shown in (images, images[..., :20], images.contiguous(memory_format=torch.channels_last)):
        scaled = data.normalize_images(shown)
        assert torch.equal(scaled, (shown.float() - mean) / std)
        assert scaled.is_contiguous(memory_format=torch.channels_last)

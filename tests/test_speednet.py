"""The speed recipe's network: what it does to patches, to images it is unsure of, and to gradients."""

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from project.errors import UsageError
from project.model.classifier import Classifier
from project.model.speednet import SpeedNet, _Conv3x3, _FastWeightGradient


def network(**settings: object) -> SpeedNet:
    torch.manual_seed(0)
    net = SpeedNet(widths=(8, 12, 16), **settings).double()  # type: ignore[arg-type]
    torch.nn.init.normal_(net.head.weight, std=40.0)
    return net.eval()


IMAGES = torch.randn(20, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_has_the_published_size() -> None:
    parameters = {name: parameter.numel() for name, parameter in SpeedNet().named_parameters()}
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    assert sum(parameters.values()) == convolutions + 24 * 13 + 2560 + 2 * (64 + 64 + 4 * 256)


def test_the_first_convolution_whitens_patches_and_is_not_trained() -> None:
    images = IMAGES.cumsum(dim=3)  # neighbouring pixels are alike, as in photographs
    net = network()
    net.look_at(images)
    outputs = torch.conv2d(images, net.whiten.weight).transpose(0, 1).flatten(1)
    assert torch.equal(outputs[12:], -outputs[:12])
    covariance = outputs[:12] @ outputs[:12].T / outputs.shape[1]
    assert torch.allclose(covariance, torch.eye(12, dtype=torch.float64), atol=0.01)
    assert not any(parameter.requires_grad for parameter in net.whiten.parameters())


def test_weights_that_were_whitened_stay_as_they_are() -> None:
    first, second = network(), network()
    first.look_at(IMAGES)
    second.load_state_dict(first.state_dict())
    second.look_at(IMAGES.flip(0).cumsum(dim=2))
    assert torch.equal(second.whiten.weight, first.whiten.weight)


def test_without_a_data_module_that_shows_it_images_it_says_what_is_missing() -> None:
    module = Classifier(SpeedNet(widths=(4, 4, 4)))
    loader = DataLoader(TensorDataset(IMAGES.float(), torch.zeros(20, dtype=torch.int64)), 10)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises(UsageError, match="SpeedNet looks at training images first"):
        trainer.fit(module, loader, loader)


def test_the_smallest_images_that_it_names_work() -> None:
    assert network(image_size=9)(IMAGES[:, :, :9, :9]).shape == (20, 10)


def test_a_convolution_begins_by_handing_its_input_on() -> None:
    assert torch.allclose(_Conv3x3(24, 64)(IMAGES.float()[:, :1].expand(-1, 24, -1, -1))[:, :24], IMAGES.float()[:, :1])


def test_only_images_it_is_unsure_of_are_averaged_over_six_views() -> None:
    with torch.no_grad():
        plain = network(unsure_below=0)(IMAGES)
        everywhere = network(unsure_below=1)(IMAGES)
        confidence = plain.softmax(dim=1).amax(dim=1)
        threshold = float(confidence.sort().values[9:11].mean())  # between two images
        mixed = network(unsure_below=threshold)(IMAGES)
    sure = confidence >= threshold
    assert 0 < sure.sum() < len(IMAGES)
    assert torch.allclose(mixed[sure], plain[sure], rtol=1e-12)
    assert torch.allclose(mixed[~sure], everywhere[~sure], rtol=1e-12)
    assert (mixed[~sure] - plain[~sure]).abs().max() > 1e-3


def test_the_views_are_the_image_and_two_shifts_each_mirrored_too() -> None:
    padded = torch.nn.functional.pad(IMAGES, (1, 1, 1, 1), mode="reflect")
    views = {IMAGES: 1 / 2, padded[:, :, :-2, :-2]: 1 / 4, padded[:, :, 2:, 2:]: 1 / 4}
    with torch.no_grad():
        plain = network(unsure_below=0)
        by_hand = sum(weight * (plain(view) + plain(view.flip(3))) / 2 for view, weight in views.items())
        assert torch.allclose(network()(IMAGES), by_hand, rtol=1e-10)


def test_the_logits_of_an_image_do_not_depend_on_its_batch() -> None:
    net = network(unsure_below=0.5)
    with torch.no_grad():
        assert torch.allclose(net(IMAGES)[7:9], net(IMAGES[7:9]), rtol=1e-10)


def test_training_averages_nothing() -> None:
    net = network().train()
    assert torch.equal(net(IMAGES), network(unsure_below=0).train()(IMAGES))


def test_the_fast_gradient_is_the_gradient() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_FastWeightGradient.apply, (x, weight))
    assert torch.equal(_FastWeightGradient.apply(x, weight), torch.conv2d(x, weight, padding=1))


def test_in_bfloat16_both_gradients_agree_to_its_precision() -> None:
    torch.manual_seed(0)
    convolution = _Conv3x3(128, 16)
    x = torch.randn(6, 128, 7, 7).to(torch.bfloat16).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        assert "FastWeightGradient" in type(convolution(x).grad_fn).__name__
        convolution(x).float().square().sum().backward()
    fast, convolution.weight.grad = convolution.weight.grad, None
    torch.conv2d(x, convolution.weight.bfloat16(), padding=1).float().square().sum().backward()
    assert fast is not None
    assert (fast - convolution.weight.grad).norm() < 0.01 * fast.norm()


@pytest.mark.parametrize("wrong", [{"widths": (0, 1, 1)}, {"num_classes": 1}, {"image_size": 8}, {"unsure_below": 1.5}])
def test_a_setting_that_cannot_work_is_named(wrong: dict) -> None:
    with pytest.raises(UsageError, match=f"--model.network.{next(iter(wrong))}"):
        SpeedNet(**wrong)

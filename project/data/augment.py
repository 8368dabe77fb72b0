"""Augmentation as a function of (seed, epoch, image): no process, worker, device or batch can change it."""

import numpy as np
import torch
from torch import Tensor

_64_BITS = 2**64 - 1


def generator(*key: int) -> torch.Generator:
    """Return a random generator that depends on the numbers given alone; different numbers, independent streams."""
    return torch.Generator().manual_seed(seed_of(*key))


def seed_of(*key: int) -> int:
    """Mix numbers into one seed of 64 bits. The last number of a key says what it is for, so that no two uses meet.

    0 is the order of an epoch's images, 1 their augmentation, 2 the validation split, 3 what a step draws, 4 dropout, 5
    which images are mirrored first where that alternates. Three numbers at least: in a shorter one, zeros at the end
    would not count.
    """
    assert len(key) > 2
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def mixed(seed: int, number: int) -> int:
    """Return a seed of 64 bits for one of a sequence, as `seed_of` would, in a tenth of the time.

    Source: SplitMix64; Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195.
    """
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return z ^ (z >> 31)


class Augmentation:
    """Shift each image by up to some pixels, the border filled by reflection, and mirror half of them.

    The whole epoch's shifts and flips are drawn at once, from one generator, and looked up by image.

    Args:
        num_images: Number of images in the set that the positions index.
        shift: Largest shift in pixels, each way in both directions; 0 for none.
        flip: Whether to mirror images left to right with probability one half.
        seed: Seed of the run.
        alternate: Whether an image is mirrored in every other epoch instead: half of them in the even ones, drawn once.
            Source: Keller Jordan, 2024, arXiv:2404.00498.
    """

    def __init__(self, num_images: int, shift: int, flip: bool, seed: int, alternate: bool = False) -> None:
        self.num_images = num_images
        self.shift = shift
        self.flip = flip
        self.seed = seed
        self.alternate = alternate
        self._epoch: int | None = None
        self._shifts = torch.empty(0)
        self._flips = torch.empty(0)

    def draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the epoch's draws: offsets int64 (2, num_images) in 0..2*shift, and flips bool (num_images,)."""
        if epoch != self._epoch:
            stream = generator(self.seed, epoch, 1)  # 0 is the order of the images
            self._shifts = torch.randint(2 * self.shift + 1, (2, self.num_images), generator=stream)
            if self.alternate:
                stream = generator(self.seed, 0, 5)
            self._flips = torch.rand(self.num_images, generator=stream) < 0.5
            if self.alternate and epoch % 2:
                self._flips = ~self._flips
            self._epoch = epoch
        return self._shifts, self._flips

    def __call__(self, images: Tensor, positions: Tensor, epoch: int) -> Tensor:
        """Augment a batch.

        Args:
            images: uint8 (B, 3, H, W).
            positions: int64 (B,), the number of each image in its set.
            epoch: Epoch, counted from 0.

        Returns:
            The augmented images, uint8 (B, 3, H, W).
        """
        shifts, flips = self.draw(epoch)
        down, across = shifts[:, positions]
        mirrored = images.flip(3)
        if self.flip:
            either = torch.cat((images, mirrored))
            chosen = torch.arange(len(images)) + len(images) * flips[positions]
            images, mirrored = either.index_select(0, chosen), either.index_select(0, (chosen + len(images)) % len(either))
            across = torch.where(flips[positions], 2 * self.shift - across, across)  # the same window, seen in the mirror
        return _shifted(images, mirrored, self.shift, down, across) if self.shift else images


def _shifted(images: Tensor, mirrored: Tensor, most: int, down: Tensor, across: Tensor) -> Tensor:
    """Cut a window out of each image, padded on all sides by reflection.

    Every window is one copy: it is a slice of a view in which slices overlap, one beginning at every padded pixel.

    Args:
        images: uint8 (B, 3, H, W).
        mirrored: The same, mirrored left to right; what is beside an image is a part of its mirror image.
        most: Width of the padding in pixels.
        down: int64 (B,), the window's first row, in 0..2*most.
        across: int64 (B,), its first column.

    Returns:
        The windows, uint8 (B, 3, H, W).
    """
    batch, channels, height, width = images.shape
    row = width + 2 * most
    plane = (height + 2 * most) * row
    padded = images.new_empty(batch, channels, height + 2 * most, row)
    middle = padded[:, :, most:-most]
    middle[..., :most] = mirrored[..., -most - 1 : -1]
    middle[..., most:-most] = images
    middle[..., -most:] = mirrored[..., 1 : most + 1]
    padded[:, :, :most] = padded[:, :, most + 1 : 2 * most + 1].flip(2)
    padded[:, :, -most:] = padded[:, :, -2 * most - 1 : -most - 1].flip(2)
    last = (channels - 1) * plane + (height - 1) * row + width - 1  # pixel of a window, counted from its first
    windows = padded.as_strided((padded.numel() - last, channels, height, width), (1, plane, row, 1))
    return windows.index_select(0, torch.arange(batch) * channels * plane + down * row + across)

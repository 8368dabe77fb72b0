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
        if self.shift:
            height, width = images.shape[2:]
            images = _reflect(_reflect(images, 2, self.shift), 3, self.shift)
            windows = images.unfold(2, height, 1).unfold(3, width, 1)  # a view: (B, 3, 2s+1, 2s+1, H, W)
            images = windows[torch.arange(len(images)), :, shifts[0, positions], shifts[1, positions]]
        if self.flip:
            images = torch.where(flips[positions, None, None, None], images.flip(3), images)
        return images


def _reflect(images: Tensor, dim: int, width: int) -> Tensor:
    """Pad a dimension on both sides by reflection; torch's own `pad` has no uint8 on the CPU."""
    size = images.shape[dim]
    place = torch.arange(-width, size + width).abs()
    return images.index_select(dim, torch.where(place < size, place, 2 * (size - 1) - place))

"""Generated pictures, for a first run without a download."""

import numpy as np

from project.data.sources import Progress, Source


class SyntheticSource(Source):
    """Ten classes of generated shapes and patterns, the same on every machine, drawn in about a second.

    Place, size, colours and contrast are random, so no pixel says anything by itself and a linear model fails; each
    class is its own mirror image, so that flips keep the label.

    Args:
        image_size: Height and width of the images, in pixels.
    """

    name = "synthetic"
    sizes = {"train": 6000, "test": 2000}
    classes = [
        "disc", "ring", "square", "frame", "triangle", "plus", "cross", "rows", "columns", "checkers",
    ]  # fmt: skip

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def class_names(self) -> list[str]:
        """Return the names of the shapes."""
        return self.classes

    def fingerprint(self) -> str:
        """Return the version of the drawing; raise the number when the pictures change."""
        return f"synthetic 1 {self.sizes}"

    def class_counts(self) -> dict[str, list[int]]:
        """Return equal numbers of every shape."""
        return {split: [size // len(self.classes)] * len(self.classes) for split, size in self.sizes.items()}

    def read(self, split: str, images: np.ndarray, labels: np.ndarray, progress: Progress) -> None:
        """Draw a split."""
        random = np.random.Generator(np.random.Philox(key=0 if split == "train" else 1))
        labels[:] = np.arange(len(labels)) % len(self.classes)
        for start in range(0, len(labels), 1000):
            chunk = slice(start, start + 1000)
            images[chunk] = _draw(labels[chunk], self.image_size, random)
            progress(len(labels[chunk]))


def _draw(labels: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Draw one picture for each label; returns uint8 (n, 3, size, size)."""
    count = len(labels)
    per_image = (count, 1, 1)
    radius = random.uniform(0.28, 0.44, per_image)  # in units of the picture's height
    centre = random.uniform(-1, 1, (2, count, 1, 1)) * (0.48 - radius)
    grid = (np.arange(size) + 0.5) / size - 0.5
    y = (grid[None, :, None] - centre[0]) / radius
    x = (grid[None, None, :] - centre[1]) / radius
    distance, box = np.hypot(x, y), np.maximum(abs(x), abs(y))
    inside = box < 1
    period = random.uniform(0.5, 0.8, per_image)
    rows, columns = (y / period) % 1 < 0.5, (x / period) % 1 < 0.5
    shapes = [
        distance < 1,
        (distance < 1) & (distance > 0.6),
        box < 0.85,
        (box < 0.9) & (box > 0.55),
        (abs(x) < (y + 0.9) / 1.8) & (y < 0.9),
        ((abs(x) < 0.28) | (abs(y) < 0.28)) & inside,
        ((abs(x - y) < 0.4) | (abs(x + y) < 0.4)) & inside,
        rows & inside,
        columns & inside,
        (rows ^ columns) & inside,
    ]
    mask = np.choose(labels[:, None, None], np.broadcast_arrays(*shapes))[:, None]
    # Brighter or darker than the ground by turns: the mean picture of every class is the same grey.
    sign = np.where(random.random((count, 1, 1, 1)) < 0.5, 1, -1)
    ground = 0.5 - sign * random.uniform(0.1, 0.4, (count, 3, 1, 1))
    figure = ground + sign * random.uniform(0.35, 0.55, (count, 3, 1, 1))
    noise = random.normal(0, 0.05, (count, 3, size, size))
    return (np.clip(np.where(mask, figure, ground) + noise, 0, 1) * 255).astype(np.uint8)

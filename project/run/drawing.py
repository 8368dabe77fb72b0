"""Pictures of what a run does, drawn by Pillow, which is here for the images anyway: every epoch pays for some."""

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

WHITE, BLACK, GREY = (255, 255, 255), (20, 20, 20), (120, 120, 120)
DARK = np.array([8, 48, 107])  # the colour of a full cell
# A text that the default font lacks letters for, as a Chinese name, is drawn in the first of these that has all of it.
FONTS = (
    *("DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "NotoSansSC-Regular.otf", "SourceHanSansSC-Regular.otf"),
    *("wqy-microhei.ttc", "wqy-zenhei.ttc", "DroidSansFallbackFull.ttf", "PingFang.ttc", "Hiragino Sans GB.ttc"),
    *("Arial Unicode.ttf", "msyh.ttc", "simsun.ttc"),
)
MOST_NUMBERS = 20  # classes up to which a cell is large enough for its number


def confusion_matrix(confusion: Tensor, names: Sequence[str], title: str = "") -> np.ndarray:
    """Draw a confusion matrix: a row for each true class, a column for each predicted one, dark where many are.

    Args:
        confusion: Numbers of images, int64 (K, K).
        names: K names.
        title: Stands above it.

    Returns:
        uint8 (H, W, 3).
    """
    counts = confusion.numpy()
    k = len(counts)
    numbers = k <= MOST_NUMBERS
    cell = 44 if numbers else max(2, 880 // k)
    names = legible(names)
    text_size = 13 if numbers else max(6, min(13, cell))
    labelled = cell >= 8
    margin = 30 + (max(round(_font(text_size, name).getlength(_short(name))) for name in names) if labelled else 0)
    top, size = 34 + margin, k * cell
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # Under a square root small shares, which are the mistakes, can be seen.
    colours = 255 - np.sqrt(share)[..., None] * (255 - DARK)
    width = max(margin + size + 16, round(_font(15).getlength(title)) + 24)
    picture = Image.new("RGB", (width, top + size + 16), WHITE)
    cells = np.repeat(np.repeat(colours.round().astype(np.uint8), cell, axis=0), cell, axis=1)
    picture.paste(Image.fromarray(cells), (margin, top))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((margin - 1, top - 1, margin + size, top + size), outline=GREY)
    draw.text((12, 8), title, fill=BLACK, font=_font(15))
    for number, name in enumerate(names if labelled else ()):
        middle = number * cell + cell // 2
        draw.text((margin - 6, top + middle), _short(name), fill=BLACK, font=_font(text_size, name), anchor="rm")
        label = _upright(_short(name), _font(text_size, name))
        picture.paste(label, (margin + middle - 8, top - label.height - 4))
    if numbers:
        small = _font(12)
        for row, column in zip(*np.nonzero(counts), strict=True):
            where = (margin + column * cell + cell // 2, top + row * cell + cell // 2)
            colour = WHITE if share[row, column] > 0.2 else BLACK
            draw.text(where, _compact(int(counts[row, column])), fill=colour, font=small, anchor="mm")
    return np.asarray(picture)


def captioned(images: Tensor, captions: Sequence[Sequence[str]], title: str = "", side: int = 128) -> np.ndarray:
    """Draw images in a grid, with lines of text below each.

    Args:
        images: uint8 (N, 3, H, W); of none there is the title alone.
        captions: The lines of each.
        title: Stands above them.
        side: Pixels that the longer side of an image is shown at.

    Returns:
        uint8 (H, W, 3).
    """
    columns = max(1, min(len(images), 8 if len(images) > 16 else 4))
    rows = -(-len(images) // columns)
    lines = max(map(len, captions), default=0)
    gap, line, top = 10, 16, 34
    height = side + lines * line + gap
    width = max(gap + columns * (side + gap), round(_font(15).getlength(title)) + 2 * gap)
    picture = Image.new("RGB", (width, top + rows * height), WHITE)
    draw = ImageDraw.Draw(picture)
    draw.text((gap, 8), title, fill=BLACK, font=_font(15))
    for number, (pixels, caption) in enumerate(zip(images.permute(0, 2, 3, 1).numpy(), captions, strict=True)):
        x, y = gap + number % columns * (side + gap), top + number // columns * height
        image = Image.fromarray(pixels)
        scale = side / max(image.size)
        shown = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        picture.paste(image.resize(shown, Image.Resampling.NEAREST), (x, y))
        for place, words in enumerate(caption):
            font = _font(12, words)
            draw.text((x, y + side + 2 + place * line), _cut(words, side, font), fill=BLACK, font=font)
    return np.asarray(picture)


def as_png(picture: np.ndarray) -> bytes:
    """Return a picture, uint8 (H, W, 3), as the contents of a PNG file."""
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=1)  # of 6 the two of an epoch take twice as long
    return file.getvalue()


def legible(names: Sequence[str]) -> list[str]:
    """Return the names of classes as this system can draw them: one that no font has is "class 3", by its place."""
    return [name if _face(name) is not None else f"class {number}" for number, name in enumerate(names)]


def _font(size: int, text: str = "") -> Any:
    """Return a font for a text."""
    return _sized(_face(text) or "", size)


@cache
def _sized(face: str, size: int) -> Any:
    return ImageFont.truetype(face, size) if face else ImageFont.load_default(size)


def _face(text: str) -> str | None:
    """Return the font that has every letter of a text, "" for Pillow's own; None where there is none."""
    return "" if text.isascii() else _face_for(frozenset(text))


@cache
def _face_for(letters: frozenset[str]) -> str | None:
    for face in ("", *FONTS):
        try:
            font = _sized(face, 12)
        except OSError:  # not on this system
            continue
        lacking = bytes(font.getmask("\uffff"))
        if all(letter.isspace() or bytes(font.getmask(letter)) != lacking for letter in letters):
            return face
    return None


def _upright(text: str, font: Any) -> Image.Image:
    """Return text that reads upwards."""
    label = Image.new("RGB", (round(font.getlength(text)) + 2, 16), WHITE)
    ImageDraw.Draw(label).text((0, 8), text, fill=BLACK, font=font, anchor="lm")
    return label.rotate(90, expand=True)


def _cut(text: str, width: int, font: Any) -> str:
    """Return as much of a text as fits."""
    if font.getlength(text) <= width:
        return text
    return next((text[:n] + "…" for n in range(len(text) - 1, 0, -1) if font.getlength(text[:n] + "…") <= width), "")


def _short(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"


def _compact(count: int) -> str:
    return str(count) if count < 10_000 else f"{count / 1000:.0f}k" if count < 1_000_000 else f"{count / 1e6:.1f}M"

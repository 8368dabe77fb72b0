"""The pictures: what is where in them."""

import numpy as np
import pytest
import torch
from PIL import Image

from project.run import drawing
from project.run.drawing import as_png, captioned, confusion_matrix, legible

BLUE = (8, 48, 107)


def test_a_full_cell_of_a_confusion_matrix_is_dark_and_an_empty_one_white() -> None:
    picture = confusion_matrix(torch.diag(torch.tensor([5, 7, 9])), ["a", "b", "c"], "title")
    dark = (picture == BLUE).all(axis=2)
    rows, columns = np.nonzero(dark)
    top, left = rows.min(), columns.min()
    cell = (rows.max() + 1 - top) // 3
    assert (columns.max() + 1 - left) // 3 == cell
    for row in range(3):
        for column in range(3):
            corner = picture[top + row * cell + 2, left + column * cell + 2]
            assert tuple(corner) == (BLUE if row == column else (255, 255, 255)), (row, column)


@pytest.mark.parametrize("num_classes", [2, 10, 21, 100, 500])
def test_a_confusion_matrix_of_any_size_is_drawn(num_classes: int) -> None:
    names = [f"a class with quite a long name {n}" for n in range(num_classes)]
    picture = confusion_matrix(torch.ones(num_classes, num_classes, dtype=torch.int64), names)
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert max(picture.shape) < 1300


def test_numbers_stand_in_the_cells_of_few_classes_alone() -> None:
    def light_within_the_first_dark_cell(num_classes: int) -> int:
        picture = confusion_matrix(123 * torch.eye(num_classes, dtype=torch.int64), [""] * num_classes)
        rows, columns = np.nonzero((picture == BLUE).all(axis=2))
        cell = (rows.max() + 1 - rows.min()) // num_classes
        first = picture[rows.min() : rows.min() + cell, columns.min() : columns.min() + cell]
        return int((first.min(axis=2) > 200).sum())

    assert light_within_the_first_dark_cell(4) > 10
    assert light_within_the_first_dark_cell(40) == 0


def test_images_are_shown_enlarged_pixel_by_pixel_in_reading_order() -> None:
    images = torch.zeros(5, 3, 2, 2, dtype=torch.uint8)
    for number in range(5):
        images[number, 0] = 50 * number + 10  # a red of its own
    picture = captioned(images, [[f"image {n}", "and more"] for n in range(5)], "title", side=40)
    places = []
    for number in range(5):
        rows, columns = np.nonzero((picture == (50 * number + 10, 0, 0)).all(axis=2))
        assert len(rows) == 40 * 40
        places.append((rows.min(), columns.min()))
    assert places == sorted(places)
    assert [row for row, _ in places[:4]] == [places[0][0]] * 4
    assert places[4][0] > places[0][0] + 40


def test_an_oblong_image_keeps_its_shape() -> None:
    picture = captioned(
        torch.full((1, 3, 2, 8), 99, dtype=torch.uint8), [["a caption that is much too long for it"]], side=80
    )
    rows, columns = np.nonzero((picture == (99, 99, 99)).all(axis=2))
    assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (20, 80)


def test_a_png_file_holds_the_same_pixels(tmp_path) -> None:  # type: ignore[no-untyped-def]
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    (tmp_path / "p.png").write_bytes(as_png(picture))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "p.png")), picture)


def test_of_no_images_there_is_the_title_alone() -> None:
    picture = captioned(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), [], "no mistakes")
    assert picture.shape[0] < 50 < picture.shape[1]
    assert (picture < 100).any()


def test_names_in_any_writing_can_be_told_apart() -> None:
    """By a font of the system's, or by their numbers: boxes in the place of letters say nothing."""
    names = ["cat", "猫", "狗", "кошка", "σκύλος", "\U0010fffd"]
    drawn = legible(names)
    assert drawn[0] == "cat"
    assert drawn[5] == "class 5"  # of no writing
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert len({captioned(images, [[name]]).tobytes() for name in drawn}) == len(names)
    one, other = (confusion_matrix(torch.eye(2, dtype=torch.int64), pair) for pair in (["猫", "a"], ["狗", "a"]))
    assert one.tobytes() != other.tobytes() or drawn[1] == "class 1"


def test_a_writing_that_no_font_has_is_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("project.run.drawing.FONTS", ("not-there.ttf",))
    monkeypatch.setattr("project.run.drawing._face_for", drawing._face_for.__wrapped__)
    assert legible(["cat", "猫", "dog"]) == ["cat", "class 1", "dog"]

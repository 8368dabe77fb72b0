"""What predict.py finds: brought together from all ranks, in the order of the files, as a table, CSV and JSON."""

import csv
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project.data.batches import BLANK
from project.data.files import ImageFiles
from project.errors import RunError
from project.run.storage import write_durably
from project.run.use import say

SECONDS_BETWEEN_LINES = 30.0  # of progress, where there is no bar
BATCHES_APART = 100  # that one rank may be ahead of another, which it waits for at the end; that has a time limit
MOST_NAMES = 20  # printed of the files that could not be read


class Predictions(Callback):
    """What `predict` finds, on rank 0, once it has ended; says now and then how far it is.

    Args:
        data: Knows the files.
        class_names: By label.
        top: How many classes to keep of each image, the likeliest first.
        quiet: Whether to say nothing.

    Attributes:
        unread: Positions of the files that have no label, and why.
    """

    def __init__(self, data: ImageFiles, class_names: Sequence[str], top: int, quiet: bool = False) -> None:
        self.data, self.class_names, self.top, self.quiet = data, class_names, top, quiet
        self.unread: dict[int, str] = {}
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []  # of this rank: positions, labels, confidences
        self._last_line = time.monotonic()

    def __iter__(self) -> Iterator[tuple[str, list[tuple[str, float]], str]]:
        """Yield each file with its likeliest classes and their probabilities, or none and the reason."""
        for position, (file, labels, shares) in enumerate(zip(self.data.files, self._labels, self._shares, strict=True)):
            reason = self.unread.get(position, "")
            best = () if reason else zip(labels.tolist(), shares.tolist(), strict=True)
            yield file, [(self.class_names[label], share) for label, share in best], reason

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have no bar for a single batch."""
        if (bar := trainer.progress_bar_callback) and trainer.num_predict_batches[0] <= 1:
            bar.disable()

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Tensor, batch: Any, batch_idx: int, *_: int
    ) -> None:
        """Keep a batch's likeliest classes."""
        shares, labels = (part[:, : self.top].cpu() for part in outputs.sort(dim=1, descending=True, stable=True))
        positions = batch[1].cpu()
        there = positions != BLANK
        self._parts.append((positions[there], labels[there], shares[there]))
        if batch_idx % BATCHES_APART == BATCHES_APART - 1:
            trainer.strategy.barrier()
        now, shows = time.monotonic(), trainer.is_global_zero and not self.quiet and not trainer.progress_bar_callback
        if shows and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line, done = now, (batch_idx + 1) / trainer.num_predict_batches[0]
            print(f"{done:.0%} of {len(self.data.files):,} files", file=sys.stderr, flush=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring together what the ranks have."""
        ranks: list[Any] = [(self._parts, self.data.unread)] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.gather_object(ranks[0], ranks if trainer.is_global_zero else None)
        shape = len(self.data.files), self.top
        self._labels, self._shares = torch.zeros(shape, dtype=torch.int64), torch.full(shape, torch.nan)
        for positions, *best in (part for parts, _ in ranks for part in parts):
            self._labels[positions], self._shares[positions] = best
        nan = [(int(row), "the network's output for it is not a number") for row in self._shares.isnan().any(1).nonzero()]
        self.unread = dict(nan + [pair for _, unread in ranks for pair in unread])

    def as_lines(self) -> Iterator[str]:
        """Yield a table of the files that have a label."""
        width = max(len("label"), *(len(shown(name)) for name in self.class_names))
        yield f"{'label':<{width}}  confidence  " * self.top + "file"
        for file, best, _ in self:
            if best:
                yield "".join(f"{shown(label):<{width}}  {share:10.4f}  " for label, share in best) + shown(file)

    def as_csv(self) -> bytes:
        r"""Return a row for each file; in its name, `\udc80` to `\udcff` stand for bytes that are not UTF-8."""
        text, numbers = io.StringIO(), ["", *(f"_{number}" for number in range(2, self.top + 1))]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", *(name + number for number in numbers for name in ("label", "confidence")), "error"])
        for file, best, reason in self:
            cells = [cell for label, share in best for cell in (label, f"{share:.6f}")]
            writer.writerow([file, *(cells or [""] * 2 * self.top), reason])
        return text.getvalue().encode(errors="backslashreplace")

    def as_json(self, checkpoint: Path) -> bytes:
        """Return all of it, each name to the last byte."""
        result: dict[str, Any] = {"checkpoint": str(checkpoint), "class_names": self.class_names}
        result |= {"predictions": [], "unread": [], "hidden": self.data.hidden}
        for file, best, reason in self:
            top = [{"label": label, "confidence": round(share, 6)} for label, share in best]
            kind, more = ("unread", {"reason": reason}) if reason else ("predictions", {**top[0], "top": top})
            result[kind].append({"file": file, **more})
        return (json.dumps(result, indent=2) + "\n").encode()


def report(found: Predictions, checkpoint: Path, csv_file: Path | None, json_file: Path | None) -> None:
    """Write the files, or print the table; then name what has no label.

    Raises:
        RunError: There was such.
    """
    num_files, num_unread = len(found.data.files), len(found.unread)
    lines = found.as_lines() if num_unread < num_files else iter(())
    if csv_file:
        write_durably(csv_file, lambda file: file.write(found.as_csv()))
    if json_file:
        write_durably(json_file, lambda file: file.write(found.as_json(checkpoint)))
    if saved := " and ".join(str(file) for file in (csv_file, json_file) if file):
        also = f", {num_unread:,} could not be read" if num_unread else ""
        lines = iter([f"{num_files - num_unread:,} images{also}; saved {saved}"])
    say(lines)
    if found.data.hidden and not found.quiet:
        print("left out, being hidden:", ", ".join(_some(found.data.hidden)), file=sys.stderr)
    for line in _some([f"could not read {file}: {reason}" for file, _, reason in found if reason]):
        print(line, file=sys.stderr)
    if num_unread:
        raise RunError(f"{num_unread:,} of {num_files:,} files could not be read")


def shown(text: str) -> str:
    """Return a name in one line, with nothing in it that a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_NAMES
    return [*map(shown, lines[:MOST_NAMES]), *([f"... and {more:,} more; --json lists them all"] if more > 0 else [])]

"""Warnings as one plain line each, once, on rank 0, and kept for the closing summary."""

import logging
import sys
import warnings
from typing import Any, TextIO

from lightning.pytorch.utilities import rank_zero_only

# Lightning's remarks that do not apply here, each with the reason.
NOT_APPLICABLE = (
    r".*does not have many workers.*",  # one process prepares batches far faster than it trains; see data/datamodule.py
    r".*recommended to use `Trainer\(devices=1.*",  # evaluation is exact on any number of devices; see data/batches.py
    r".*The `srun` command is available on your system but is not used.*",  # a job that needs it is refused; see cluster.py
    r".*number of training batches .* is smaller than the logging interval.*",  # every epoch's end is logged
    r".*Total length of `list` across ranks is zero.*",  # --data.val_fraction 0 asks for no validation images
    r".*You are using `torch.load` with `weights_only=False`.*",  # never: checkpoints are loaded with weights_only=True
)


class Notices:
    """Collects the warnings of a run.

    Attributes:
        messages: The text of each warning shown so far, in order, each once.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def install(self) -> None:
        """Show warnings as single lines from now on, and quieten what only repeats the summary."""
        for pattern in NOT_APPLICABLE:
            warnings.filterwarnings("ignore", pattern)
        for category in (DeprecationWarning, FutureWarning):  # between libraries; the tests watch these, not the user
            warnings.simplefilter("ignore", category)
        warnings.showwarning = self._show  # the documented hook
        # Device lists, ranks joining, advertisements: the summary says what matters.
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)

    def _show(
        self,
        message: Any,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = " ".join(str(message).split())
        if rank_zero_only.rank == 0 and text not in self.messages:  # type: ignore[attr-defined]
            self.messages.append(text)
            print(f"warning: {text}", file=sys.stderr, flush=True)

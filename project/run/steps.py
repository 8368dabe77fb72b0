"""Which flag replaces which manual step: the one source of the table in classifier.py, in the README and in `--explain`.

`python -m project.run.steps` writes it into the first two again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NAMES = {
    1: "launch",
    2: "choose devices",
    3: "check accelerator",
    4: "process group",
    5: "own device",
    6: "split the data",
    7: "reshuffle",
    8: "batch size",
    9: "model to device",
    10: "wrap",
    11: "batch to device",
    12: "the step",
    13: "report",
    14: "save",
    15: "load",
    16: "clean up",
}
ANY, GPU, DEVICES, DP, DDP = "every command", "--accelerator gpu", "--devices 0,2", "--strategy dp", "--strategy ddp"


@dataclass(frozen=True)
class Replaced:
    """One manual step that a flag replaces.

    Attributes:
        flag: ANY, or the flag and its value.
        step: Its number, a key of NAMES.
        by_hand: Its line in scripts/manual; "..." stands for what is left out.
        now: The symbol that does it now.
    """

    flag: str
    step: int
    by_hand: str
    now: str

    @property
    def symbol(self) -> str:
        """The symbol without its module."""
        names = self.now.split(".")
        first_class = next((i for i, name in enumerate(names) if name[0].isupper()), len(names) - 2)
        return ".".join(names[first_class:])


DATA_MODULE = "project.data.datamodule.ImageDataModule"
STRATEGIES = "lightning.pytorch.strategies"
TABLE = (
    Replaced(DDP, 1, "torchrun --nproc_per_node=2 ...", "project.run.launch.launch"),
    Replaced(DEVICES, 2, "CUDA_VISIBLE_DEVICES", "lightning.pytorch.accelerators.CUDAAccelerator.parse_devices"),
    Replaced(GPU, 3, "torch.cuda.is_available()", "project.run.checks.check_accelerator"),
    Replaced(DDP, 4, 'dist.init_process_group("nccl" ...)', f"{STRATEGIES}.DDPStrategy.setup_environment"),
    Replaced(DDP, 5, "torch.cuda.set_device(device)", f"{STRATEGIES}.DDPStrategy.setup_environment"),
    Replaced(DDP, 6, "GlobalBatchSampler(..., world_size, rank)", f"{DATA_MODULE}.train_dataloader"),
    Replaced(DDP, 7, "train_sampler.set_epoch(epoch)", "project.data.batches.GlobalBatchSampler"),
    Replaced(DDP, 8, "flags.batch_size // world_size", "project.data.batches.GlobalBatchSampler"),
    Replaced(DP, 8, "nothing: DataParallel splits it", "project.run.strategies.DataParallelStrategy"),
    Replaced(GPU, 9, "model.to(device)", f"{STRATEGIES}.Strategy.model_to_device"),
    Replaced(DDP, 10, "DistributedDataParallel(model, ...)", f"{STRATEGIES}.DDPStrategy.configure_ddp"),
    Replaced(DP, 10, "DataParallel(model, device_ids=gpus)", "project.run.strategies.DataParallelStrategy"),
    Replaced(
        GPU, 11, "images.to(device), labels.to(device)", "project.data.datamodule.ImageDataModule.transfer_batch_to_device"
    ),
    Replaced(ANY, 12, "loss.backward() ... optimizer.step()", "project.model.classifier.Classifier.training_step"),
    Replaced(ANY, 13, 'print(f"epoch ... ms/step", flush=True)', "project.model.classifier.Classifier.on_train_batch_end"),
    Replaced(ANY, 14, "torch.save(model...state_dict(), path)", "project.run.storage.DurableCheckpointIO.save_checkpoint"),
    Replaced(ANY, 15, "torch.load(best, map_location=...)", "lightning.pytorch.Trainer.test"),
    Replaced(DDP, 16, "dist.destroy_process_group()", "project.run.cli.TrainCLI.leave"),
)


def replaced_by(on_gpu: bool, strategy: str) -> list[Replaced]:
    """Return the steps that a command replaces, in their order.

    Args:
        on_gpu: Whether it runs on GPUs.
        strategy: "dp", "ddp" or "single_device".
    """
    flags = {ANY, *((GPU, DEVICES) if on_gpu else ()), f"--strategy {strategy}"}
    if strategy == "dp" and not on_gpu:
        flags.remove(DP)  # nothing splits
    return [row for row in TABLE if row.flag in flags and (on_gpu or row.step != 5)]


def program_for(on_gpu: bool, strategy: str) -> str:
    """Return the hand-written program that does what a command does."""
    return f"scripts/manual/{strategy if strategy in ('dp', 'ddp') else 'gpu' if on_gpu else 'cpu'}.py"


def as_text(rows: Iterable[Replaced]) -> list[str]:
    """Return the rows as aligned lines, under a heading."""
    cells = [("flag", "step", "by hand", "what does it now")]
    cells += [(row.flag, f"{row.step:2} {NAMES[row.step]}", row.by_hand, row.symbol) for row in rows]
    widths = [max(len(cell[column]) for cell in cells) + 2 for column in range(4)]
    return ["".join(map(str.ljust, cell, widths)).rstrip() for cell in cells]


def as_markdown() -> list[str]:
    """Return the whole table for the README."""
    lines = ["| flag | step | by hand | what does it now |", "|---|---|---|---|"]
    for row in TABLE:
        flag = row.flag if row.flag == ANY else f"`{row.flag}`"
        by_hand = row.by_hand if row.by_hand.startswith("nothing") else f"`{row.by_hand}`"
        lines.append(f"| {flag} | {row.step} {NAMES[row.step]} | {by_hand} | `{row.now}` |")
    return lines


def placed(text: str, lines: list[str], start: str, end: str) -> str:
    """Return a text with the lines in place of what stands between two marks."""
    before, first, rest = text.partition(start)
    _, last, after = rest.partition(end)
    assert last, f"{start!r} and {end!r} must both be there"
    return before + first + "\n".join(["", *lines, ""]) + last + after


def write(root: Path) -> None:
    """Write the table into the LightningModule's docstring and the README of a clone."""
    for name, lines, start, end in PLACES:
        path = root / name
        path.write_text(placed(path.read_text(), lines, start, end))
        print(f"wrote the table into {path}")


PLACES = (
    ("project/model/classifier.py", as_text(TABLE), "numbered as in scripts/manual:\n", '"""'),
    ("README.md", as_markdown(), "<!-- steps: python -m project.run.steps -->\n", "\n<!-- /steps -->"),
)

if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])

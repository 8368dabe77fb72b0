"""`--explain`: what a command would do, in words, and the shapes in one real forward pass on every replica."""

import math
import os
import shlex
from collections.abc import Iterable
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project.model.classifier import span
from project.run.checks import Hardware
from project.run.outputs import RunDirectory
from project.run.steps import as_text, program_for, replaced_by

# What `--precision` keeps the weights in; all other kinds keep them in float32.
WEIGHTS = {"64": torch.float64, "64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}

MACHINES_SHOWN = 4  # each with its own line; for more there is one


def plan(
    config: Namespace,
    hardware: Hardware,
    model: Any,
    data: Any,
    run: RunDirectory,
    command: list[str],
    resumes: str = "",
) -> list[str]:
    """Return the lines that describe a command.

    Args:
        config: All settings.
        hardware: What the hardware flags come to.
        model: The Classifier.
        data: The data module; the images of one that has no `plan` are not described.
        run: Where it would write.
        command: The script and its flags.
        resumes: What it would go on from; empty for nothing.
    """
    facts = {**_hardware(hardware), **_training(config, hardware, model, data), "writes": f"{run.planned()}/"}
    if resumes:
        facts["resumes"] = resumes
    width = max(map(len, facts)) + 2
    lacks = lacking(hardware)
    program = program_for(hardware.on_gpu, hardware.family)
    return [
        "What this command would do. Nothing is trained, fetched or written.",
        *([f"This machine is not the one for it. It lacks {lacks}."] if lacks else []),
        *([hardware.missing] if hardware.missing else []),
        "",
        *(f"{name:<{width}}{text}" for name, text in facts.items()),
        "",
        f"It replaces these steps of {program}:",
        *as_text(replaced_by(hardware.on_gpu, hardware.family)),
        "",
        *_launch(hardware, [part for part in command if part != "--explain"]),
        "",
    ]


def lacking(hardware: Hardware) -> str:
    """Return what a command wants and this machine has not got; empty where it has all."""
    parts = []
    if hardware.missing:
        wanted, has = hardware.devices, hardware.available or "none"
        parts.append(
            f"GPUs ({len(wanted) if len(wanted) > hardware.available else f'number {max(wanted)}'} wanted, it has {has})"
        )
    # A real forward pass starts a process for each: more than this would only bring the machine down.
    if not hardware.on_gpu and len(hardware.devices) > max(8, _num_cores()):
        parts.append(f"cores ({len(hardware.devices)} processes wanted, it has {_num_cores()})")
    if hardware.num_nodes > 1 and not {"WORLD_SIZE", "NODE_RANK"} & set(os.environ):  # a launcher has brought them together
        parts.append(f"machines ({hardware.num_nodes} wanted, it is one)")
    return " and ".join(parts)


def _hardware(hardware: Hardware) -> dict[str, str]:
    number, machines = len(hardware.devices), hardware.num_nodes
    each = f" on each of {machines} machines" if machines > 1 else ""
    processes = number if hardware.world_size > 1 else 1
    if hardware.on_gpu:
        devices = f"{_count(number, 'GPU')}{each}: {', '.join(map(str, hardware.devices))}"
        devices += (
            "" if hardware.chosen else ", being all that are here" if hardware.available else "; all that the machine has"
        )
    else:
        devices = f"{_count(processes, 'process')}{each}"
    if hardware.strategy == "dp":
        strategy = "dp, one process, " + (f"batches split over {number}" if hardware.on_gpu else "nothing is split: no GPU")
    elif hardware.world_size > 1:
        strategy = f"{hardware.strategy}, {hardware.world_size} processes"
    else:
        strategy = f"{hardware.strategy}, one process"
    threads = torch.get_num_threads()
    if hardware.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:  # Lightning divides the cores then
        threads = max(1, _num_cores() // processes)
    backend = ("nccl" if hardware.on_gpu else "gloo") if hardware.family == "ddp" else "none: one process"
    return {
        "accelerator": hardware.accelerator,
        "devices": devices,
        "strategy": strategy,
        "process group": backend,
        "threads": f"{threads} in each process",
    }


def _training(config: Namespace, hardware: Hardware, model: Any, data: Any) -> dict[str, str]:
    trainer, lines = config.trainer, {}
    steps, known = None, hasattr(data, "plan")
    if known:
        what, counts = data.plan()
        batches, epochs, steps = length(trainer, counts["train"] // data.batch_size)
        dropped = counts["train"] - batches * data.batch_size
        parts = [len(part) for part in torch.arange(data.batch_size).chunk(hardware.num_replicas)]
        parts += [0] * (hardware.num_replicas - len(parts))  # DataParallel leaves the last devices without
        share = f"{parts[0]} on each device" if len(set(parts)) == 1 else f"{', '.join(map(str, parts))} on the devices"
        lines["data"] = what
        lines["images"] = f"{counts['train']:,} training, {counts['val']:,} validation, {counts['test']:,} test"
        lines["batch"] = f"{data.batch_size} images a step over all devices, {share}"
        lines["epoch"] = f"{batches:,} steps, " + (
            f"{dropped:,} images dropped, others each time" if dropped else "no image dropped"
        )
        lines["run"] = (
            "without end" if epochs is None or steps is None else f"{_count(epochs, 'epoch')}, {steps:,} optimizer steps"
        )
        if trainer.accumulate_grad_batches > 1:
            images = trainer.accumulate_grad_batches * data.batch_size
            lines["run"] += f", each of {trainer.accumulate_grad_batches} batches, {images} images"
    else:
        lines["data"] = type(data).__name__
    dtype = WEIGHTS.get(str(trainer.precision), torch.float32)
    parameters = [
        nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), p.requires_grad) for p in model.network.parameters()
    ]
    optimizer, scheduler = model.make_optimizer_and_schedule(parameters)
    if known:
        span(scheduler, lambda: math.inf if steps is None else steps)
    rates = sorted({group.get("initial_lr", group["lr"]) for group in optimizer.param_groups})
    lines["optimizer"] = f"{type(optimizer).__name__}, learning rate {', '.join(f'{rate:g}' for rate in rates)}"
    if scheduler is None:
        lines["schedule"] = "none: a constant rate"
    elif hasattr(scheduler, "total_steps"):
        lines["schedule"] = f"{type(scheduler).__name__} over " + (
            f"{scheduler.total_steps:,} optimizer steps" if scheduler.total_steps else "all optimizer steps"
        )
    else:
        lines["schedule"] = f"{type(scheduler).__name__}, advanced once an epoch"
    number = sum(p.numel() for p in parameters)
    lines["precision"] = str(trainer.precision or "32-true")
    lines["network"] = f"{type(model.network).__name__}, {number:,} parameters in {str(dtype).removeprefix('torch.')}"
    lines["memory"] = _in_words(*memory(parameters, optimizer), hardware)
    return lines


def length(trainer: Namespace, batches: int) -> tuple[int, int | None, int | None]:
    """Return training steps an epoch, epochs begun, and optimizer steps in all, as Lightning counts; None for no end."""
    limit, epochs, most = trainer.limit_train_batches, trainer.max_epochs, trainer.max_steps
    if trainer.fast_dev_run:
        limit, epochs = int(trainer.fast_dev_run), 1
    if limit is not None:
        batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    if epochs is None and most < 0:
        epochs = 1000  # Lightning's own limit
    steps = math.inf if epochs is None or epochs < 0 else per_epoch * epochs
    if 0 <= most < steps:
        steps, epochs = most, math.ceil(most / per_epoch) if per_epoch else 0
    return (batches, None, None) if steps == math.inf else (batches, epochs, int(steps))


def memory(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[dict[str, int], str]:
    """Return the bytes of weights, gradients and optimizer, and why the optimizer's are not among them, if they are not.

    Args:
        parameters: On the meta device; the optimizer takes a step there to show what it keeps.
        optimizer: Theirs.
    """
    size = {"weights": _bytes(parameters), "gradients": _bytes(p for p in parameters if p.requires_grad)}
    for p in parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        optimizer.step()
    # An optimizer of torch or the user's own may want a closure (TypeError: LBFGS), or numbers, which the meta device has
    # not (RuntimeError). The run can be right all the same, and the rest of the plan is; the plan shows the reason.
    except (TypeError, RuntimeError) as error:
        return size, f"{type(optimizer).__name__} could not be tried: {' '.join(str(error).split())}"
    kept = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return {**size, "optimizer": _bytes(kept)}, ""


def _in_words(size: dict[str, int], untried: str, hardware: Hardware) -> str:
    where, others = "on each device", size["weights"] + size["gradients"]
    if hardware.family == "ddp" and hardware.strategy != "ddp":  # with "ddp" the gradients lie in them
        size["ddp's buckets"] = size["gradients"]
    if hardware.strategy == "dp" and len(hardware.devices) > 1:
        where = f"on the first GPU, {_size(others)} on each other"
    sums = " + ".join(f"{_size(part)} {name}" for name, part in size.items())
    without = f"activations and optimizer ({untried})" if untried else "activations"
    return f"{sums} = {_size(sum(size.values()))} {where}, without {without}"


def _launch(hardware: Hardware, command: list[str]) -> list[str]:
    if hardware.world_size == 1:
        return ["It needs no launcher: it is one process."]
    if not hardware.is_launched:
        return ["It starts its processes from within, not by a launcher."]
    number, machines = len(hardware.devices), hardware.num_nodes
    flags = shlex.join(command)
    slurm = f"--nodes={machines} --ntasks-per-node={number}" + (f" --gpus-per-node={number}" if hardware.on_gpu else "")
    by_slurm = ["The same under Slurm:", f"sbatch {slurm} scripts/train.sbatch {shlex.join(command[1:])}".rstrip()]
    if machines == 1:
        return ["The same, launched by torchrun:", f"torchrun --nproc_per_node={number} {flags}", *by_slurm]
    where = f"--master_addr=MACHINE_0 --master_port=29500 --nproc_per_node={number}"
    each = range(machines) if machines <= MACHINES_SHOWN else ["N"]
    return [
        f"The same, launched by torchrun, on each of the {machines} machines"
        + (":" if machines <= MACHINES_SHOWN else ", N from 0:"),
        *(f"torchrun --nnodes={machines} --node_rank={number_of} {where} {flags}" for number_of in each),
        *by_slurm,
    ]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


class ShowShapes(Callback):
    """Print what every replica sees of one batch, and what it looks like from outside."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.rank = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the network; DataParallel's copies call the same hook."""
        self.rank = trainer.global_rank
        network: torch.nn.Module = pl_module.network  # type: ignore[assignment]
        network.register_forward_hook(self.see)

    def see(self, network: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Note the shapes of one replica's part."""
        shapes = f"input {list(inputs[0].shape)} output {list(output.shape)}"
        self.seen.append(f"rank {self.rank} on {output.device}: In model: {shapes}")

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Bring together what all ranks have seen, and print it on rank 0."""
        seen = [self.seen]
        images, probabilities = batch[0], outputs
        if trainer.world_size > 1:
            seen = [[] for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(seen, self.seen)
            gather = trainer.strategy.all_gather
            images, probabilities = (gather(tensor).flatten(0, 1) for tensor in (images, probabilities))
        if trainer.is_global_zero:
            print("\n".join(line for rank in seen for line in sorted(rank)))
            outside = f"Outside: input {list(images.shape)} output {list(probabilities.shape)}"
            print(outside + (", brought together from all ranks" if trainer.world_size > 1 else ""), flush=True)


def blank_batch(batch_size: int, image_size: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader of one batch: images float32 (B, 3, S, S), labels int64 (B,)."""
    batch = torch.zeros(batch_size, 3, image_size, image_size), torch.zeros(batch_size, dtype=torch.int64)
    return DataLoader([batch], batch_size=None)  # type: ignore[arg-type]

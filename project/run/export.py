"""A trained network to take away: each export is loaded again and compared with the checkpoint before it gets its name."""

import copy
import io
import json
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from project.errors import RunError, UsageError
from project.run.checks import nearest
from project.run.exit import NO_SPACE
from project.run.storage import write_durably
from project.run.trained import Trained

NUM_IMAGES = 100  # that an export is compared on
TOLERANCE = 1e-5  # of a probability
ABOUT = "metadata.json"  # what the metadata is called inside a program
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST_ONNX = 2**31 - 2**20  # bytes of weights: a protobuf message ends at 2 GiB, and the graph wants some of it

Function = Callable[[Tensor], Tensor]  # from pixels, uint8 (B, 3, S, S), to probabilities, float32 (B, K)


class Probabilities(nn.Module):
    """A network with what goes before it, the scaling of pixels, and after it, the softmax."""

    offset: Tensor
    scale: Tensor

    def __init__(self, network: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network = network
        self.dtype = dtype_of(network)
        for name, figures in (("offset", mean), ("scale", std)):
            self.register_buffer(name, 255 * torch.tensor(figures, dtype=torch.float32).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map pixels, uint8 (B, 3, S, S), to probabilities, float32 (B, K)."""
        pixels = (images.to(torch.float32) - self.offset) / self.scale  # as ImageDataModule.normalize_images, to the bit
        logits = self.network(pixels.to(self.dtype, memory_format=torch.channels_last))
        return functional.softmax(logits, dim=1, dtype=torch.float32)


def dtype_of(network: nn.Module) -> torch.dtype:
    """Return the type of a network's floating-point weights."""
    return next((value.dtype for value in network.parameters() if value.is_floating_point()), torch.float32)


def destinations(to: str, output: str | None, checkpoint: Path) -> dict[str, Path]:
    """Return where each export goes, by its format.

    Args:
        to: One format or several, as "weights,torch,onnx".
        output: The file, for a single format; None for a name beside the checkpoint.
        checkpoint: The checkpoint.

    Raises:
        UsageError: A format is not one, or lacks its packages, or a file cannot be written there.
    """
    formats = list(dict.fromkeys(name.strip() for name in to.split(",")))
    for name in formats:
        if name not in FORMATS:
            hint = nearest(name, FORMATS)
            hint = f"; did you mean {hint}?" if hint else ""
            raise UsageError(f"--to {name or repr(name)} is not one of {', '.join(FORMATS)}{hint}")
    if missing := [name for name in ONNX_PACKAGES if "onnx" in formats and find_spec(name) is None]:
        raise UsageError(f'--to onnx needs {" and ".join(missing)}: pip install -e ".[onnx]"')
    if output is not None and len(formats) > 1:
        raise UsageError(f"--output {output} is one file, and --to {to} makes {len(formats)}; leave one of the two out")
    places = {name: Path(output or checkpoint.with_suffix(FORMATS[name][0])).expanduser() for name in formats}
    for name, path in places.items():
        suffix = Path(f"net{FORMATS[name][0]}").suffix
        if path.is_dir():
            raise UsageError(f"--output {path} is a folder; name a file in it")
        if path.exists() and path.samefile(checkpoint):
            raise UsageError(f"--output {path} is the checkpoint itself; name another file")
        if path.suffix != suffix:  # so that it is never another checkpoint, an image or whatever lies there
            raise UsageError(f"--output {path} must end with {suffix}")
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--output {path}: nothing can be written in {folder}; name a file elsewhere with --output")
    return places


def export(trained: Trained, to: str, path: Path) -> list[str]:
    """Make one export, load it again, compare it, and only then write it.

    Args:
        trained: The checkpoint's network.
        to: "weights", "torch" or "onnx".
        path: The file. Beside weights, `<path>.json` tells what they are for.

    Returns:
        What to tell the user.

    Raises:
        UsageError: The network cannot be brought into this format, or the file cannot be written.
        RunError: What was loaded again gives other probabilities than the checkpoint.
    """
    about = json.dumps(describe(trained, to), indent=1, default=str)
    # What torch and its exporters say to each other is no news; what counts is compared below.
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.10's own, when it loads
        data, loaded_again = FORMATS[to][1](trained, about)
    difference = largest_difference(loaded_again, trained)
    if not difference <= TOLERANCE:  # NaN neither
        raise RunError(
            f"--to {to}: loaded again, its probabilities are up to {difference:.1e} away from the checkpoint's, more than"
            f" {TOLERANCE:.0e}; {path} is not written"
        )
    holds = f"a program from uint8 (B, 3, S, S), S = {trained.image_size}, to probabilities, with {ABOUT} inside"
    new = path.with_name(f".{path.name}.new.tmp")  # one of the two files of weights without the other is worth nothing
    try:
        write_durably(new, lambda file: file.write(data))
        if to == "weights":
            write_durably(Path(f"{path}.json"), lambda file: file.write(about.encode()))
            holds = f"a state_dict for {trained.network_class}; {path.name}.json beside it tells the rest"
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        if error.errno in NO_SPACE:
            raise
        raise UsageError(f"{path} cannot be written ({error.strerror}); name a file elsewhere with --output") from error
    same = f"probabilities within {difference:.1e} of the checkpoint's on {NUM_IMAGES} images"
    return [f"exported  {path}: {same}", f"holds     {holds}"]


def largest_difference(exported: Function, trained: Trained) -> float:
    """Return how far its probabilities are from the checkpoint's at most, on blurred noise in batches of several sizes."""
    size = (trained.image_size, trained.image_size)
    noise = torch.randint(256, (NUM_IMAGES, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()
    images = functional.interpolate(noise, size, mode="bilinear").to(torch.uint8)
    reference = Probabilities(trained.network, trained.mean, trained.std)
    with torch.no_grad():
        differences = [(exported(part) - reference(part)).abs().max() for part in (images[:1], images[:7], images)]
    return float(torch.stack(differences).max())


def describe(trained: Trained, to: str) -> dict[str, Any]:
    """Return what whoever loads an export must know: plain values."""
    size, outputs = trained.image_size, "logits" if to == "weights" else "probabilities, float32"
    return {
        "class_names": trained.class_names,
        "image_size": size,
        "mean": trained.mean,
        "std": trained.std,
        "images": f"RGB, scaled to cover the square, then cropped (Pillow: ImageOps.fit): uint8 (B, 3, {size}, {size})",
        "scaling": f"(images - 255 * mean) / (255 * std), {'before the network' if to == 'weights' else 'done inside'}",
        "outputs": f"{outputs} (B, {len(trained.class_names)}), in the order of class_names",
        "network_class": trained.network_class,
        "network_arguments": trained.network_arguments,
        "dtype": _name(torch.float32 if to == "onnx" else dtype_of(trained.network)),
        "source": trained.source,
        "optimizer_steps": trained.optimizer_steps,
        "versions": {"torch": torch.__version__},
    }


def _weights(trained: Trained, about: str) -> tuple[bytes, Function]:
    weights = {name: v.clone(memory_format=torch.contiguous_format) for name, v in trained.network.state_dict().items()}
    file = io.BytesIO()
    torch.save(weights, file)
    network = copy.deepcopy(trained.network)
    network.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True), assign=True)
    return file.getvalue(), Probabilities(network, trained.mean, trained.std)


def _program(trained: Trained, to: str) -> torch.export.ExportedProgram:
    network = copy.deepcopy(trained.network).to(memory_format=torch.contiguous_format)
    module = Probabilities(network.float() if to == "onnx" else network, trained.mean, trained.std).eval()
    images = torch.zeros(2, 3, trained.image_size, trained.image_size, dtype=torch.uint8)
    try:
        with torch.no_grad():
            program = torch.export.export(module, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    except Exception as error:  # whatever the network does
        cause = f"what its forward does must not depend on the images' values, nor on their number ({_brief(error)})"
        raise UsageError(f"--to {to}: {trained.network_class}: {cause}; use --to weights") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names folders of this machine
    return program


def _torch(trained: Trained, about: str) -> tuple[bytes, Function]:
    file = io.BytesIO()
    torch.export.save(_program(trained, "torch"), file, extra_files={ABOUT: about})
    return file.getvalue(), torch.export.load(io.BytesIO(file.getvalue())).module()


def _onnx(trained: Trained, about: str) -> tuple[bytes, Function]:
    import onnxruntime

    name, size = _name(dtype_of(trained.network)), sum(4 * v.numel() for v in trained.network.state_dict().values())
    if name not in ("float32", "float64"):
        raise UsageError(
            f"--to onnx computes in float32; in {name}, as {trained.path} does, it comes out otherwise; use --to torch"
        )
    if size > LARGEST_ONNX:
        raise UsageError(f"--to onnx: the weights take {size / 2**30:.1f} GiB, and an ONNX file ends at 2; use --to torch")
    program = _program(trained, "onnx")
    try:
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"]}
        made = torch.onnx.export(program, **names, dynamic_shapes=({0: "batch"},), verbose=False)
        assert made is not None
    except torch.onnx.OnnxExporterError as error:
        raise UsageError(f"--to onnx: {trained.network_class}: {_brief(error)}; use --to torch") from error
    made.model.metadata_props[ABOUT] = about
    data = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FORMATS: dict[str, tuple[str, Callable[[Trained, str], tuple[bytes, Function]]]] = {  # suffix; the file, and it loaded again
    "weights": (".weights.pth", _weights),
    "torch": (".pt2", _torch),
    "onnx": (".onnx", _onnx),
}

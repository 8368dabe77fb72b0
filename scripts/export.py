"""Take a trained network away: its weights, or a program that needs neither this template nor Lightning.

    python scripts/export.py logs/default/version_0                            its best checkpoint's weights, a state_dict
    python scripts/export.py logs/default/version_0 --to torch                 a torch.export program, uint8 in
    python scripts/export.py logs/default/version_0 --to onnx                  the same in ONNX
    python scripts/export.py logs/default/version_0 --to weights,torch,onnx    all three
    python scripts/export.py some.ckpt --to onnx --output elsewhere/net.onnx   of one checkpoint, under a name of yours

Each is loaded again and compared with the checkpoint before it is reported. `README.md` shows how to load them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the `project` beside this script, whatever is installed

from project.run.exit import exit_codes


def main() -> None:
    """Parse, load, export."""
    from project.run.export import destinations, export
    from project.run.flags import OneLineParser
    from project.run.trained import checkpoint_in, load_trained

    parser = OneLineParser(prog="export.py", usage="export.py CKPT [flags]", description=__doc__, allow_abbrev=False)
    parser.add_argument("ckpt", type=str, help="a checkpoint, or a run directory, for its best")
    parser.add_argument("--to", type=str, default="weights", help="weights, torch, onnx, or several with commas between")
    parser.add_argument(
        "--output", type=str, help="the file; otherwise beside the checkpoint: best.weights.pth, .pt2, .onnx"
    )
    flags = parser.parse_args()
    checkpoint = checkpoint_in(flags.ckpt)
    places = destinations(flags.to, flags.output, checkpoint)
    trained = load_trained(checkpoint)
    for to, path in places.items():
        print(*export(trained, to, path), sep="\n", flush=True)


if __name__ == "__main__":
    with exit_codes():
        main()

"""Say how well a checkpoint's network does on the test images, each counted once.

    python scripts/evaluate.py logs/default/version_0                       a run's best checkpoint, on its own test images
    python scripts/evaluate.py best.ckpt --strategy ddp --devices 2         any strategy, any number of devices
    python scripts/evaluate.py best.ckpt --data.source folder --data.root my_images    on other images
    python scripts/evaluate.py best.ckpt --json best.json --plot best.png   for a program, and the confusion matrix

The network and the data settings come from the checkpoint. `--help` lists the flags.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the `project` beside this script, whatever is installed

from project.run.exit import exit_codes


def main() -> None:
    """Parse, test, print, write."""
    from project.data.datamodule import ImageDataModule
    from project.errors import UsageError
    from project.model.classifier import Classifier
    from project.model.evaluation import MOST_CLASSES
    from project.run.drawing import as_png, confusion_matrix
    from project.run.evaluate import as_lines, data_settings, evaluate, of_other_images
    from project.run.flags import flag_of
    from project.run.storage import write_durably
    from project.run.trained import checkpoint_in, load_trained
    from project.run.use import UseParser, check_output, make_trainer, say, start

    parser = UseParser("evaluate.py CKPT [flags]", "Test a checkpoint's network.")
    parser.add_argument("ckpt", help="a .ckpt file, or a run directory, for its best")
    parser.add_argument("--json", type=str | None, help="write the figures to this file")
    parser.add_argument("--plot", type=str | None, help="write the confusion matrix to this .png file")
    parser.add_hardware_flags()
    parser.add_flags_of(ImageDataModule, "data", ("source", "root", "eval_batch_size", "num_workers", "cache_dir"))

    path = checkpoint_in(parser.parse_args().ckpt)
    settings, class_names, precision = data_settings(path)
    flags = parser.parse_args_with({f"data.{name}": value for name, value in settings.items()})
    json_file, plot_file = check_output("json", flags.json, ".json"), check_output("plot", flags.plot, ".png")
    if plot_file and len(class_names) > MOST_CLASSES:
        raise UsageError(f"--plot {plot_file}: of more than {MOST_CLASSES} classes there is no picture; leave it out")
    if plot_file and plot_file.exists() and plot_file.resolve().is_relative_to(Path(flags.data.root).resolve()):
        raise UsageError(f"--plot {plot_file} is a file among the images of --data.root; name another")
    hardware, notices = start(flags)

    settings = of_other_images({**settings, **flags.data}, class_names, flag_of("data.root", sys.argv), trained=settings)
    trained = load_trained(path)
    trainer = make_trainer(flags, hardware, flags.precision or precision)
    module = Classifier(trained.network, num_classes=len(class_names))
    data = ImageDataModule(**settings)
    data.quiet = flags.quiet
    result, findings = evaluate(trainer, module, data, trained)
    if trainer.is_global_zero:
        lines = as_lines(result)
        if json_file:
            text = json.dumps({**result, "warnings": notices.messages}, indent=2) + "\n"
            write_durably(json_file, lambda file: file.write(text.encode()))
            lines += ["", f"saved       {json_file}"]
        if plot_file and findings.confusion is not None:
            title = f"accuracy {result['test_accuracy']:.4f} on {result['num_test_images']:,} images"
            png = as_png(confusion_matrix(findings.confusion, class_names, f"{title}; rows true, columns predicted"))
            write_durably(plot_file, lambda file: file.write(png))
            lines.append(f"saved       {plot_file}")
        say(lines)


if __name__ == "__main__":
    with exit_codes():
        main()

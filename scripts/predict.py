"""Label image files with a checkpoint's network: photos of any size and kind, one by one or whole folders of them.

    python scripts/predict.py logs/default/version_0 cat.jpg dog.png        a run's best checkpoint
    python scripts/predict.py best.ckpt my_photos --top 3                   all that is in a folder, three classes for each
    python scripts/predict.py best.ckpt my_photos --csv labels.csv          for a spreadsheet; --json for a program
    python scripts/predict.py best.ckpt my_photos --strategy ddp --devices 2    any number of devices: the same output

A file that cannot be read is named, the others go on, and the exit code is 1. `--help` lists the flags.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the `project` beside this script, whatever is installed

from project.run.exit import exit_codes


def main() -> None:
    """Parse, predict, print or write."""
    from project.data.files import ImageFiles
    from project.errors import UsageError
    from project.model.classifier import Classifier
    from project.run.evaluate import data_settings
    from project.run.predict import Predictions, report
    from project.run.trained import checkpoint_in, load_trained
    from project.run.use import UseParser, check_output, make_trainer, start

    parser = UseParser("predict.py CKPT IMAGE|FOLDER... [flags]", "Label image files with a checkpoint's network.")
    parser.add_argument("ckpt", help="a .ckpt file, or a run directory, for its best")
    parser.add_argument("images", nargs="+", type=str, help="image files, and folders, with all that is in them")
    parser.add_argument("--top", type=int, default=1, help="how many classes to tell of each image, the likeliest first")
    parser.add_argument("--csv", type=str | None, help="write a row for each file to this file, instead of printing them")
    parser.add_argument("--json", type=str | None, help="write everything to this file, for a program")
    parser.add_argument("--batch_size", type=int, default=256, help="images at a time, on each device")
    parser.add_hardware_flags()

    flags = parser.parse_args()
    path = checkpoint_in(flags.ckpt)
    _, class_names, precision = data_settings(path)
    if not 1 <= flags.top <= len(class_names):
        raise UsageError(f"--top {flags.top} must be from 1 to {len(class_names)}, the number of classes")
    if flags.batch_size < 1:
        raise UsageError(f"--batch_size {flags.batch_size} must be at least 1")
    csv_file, json_file = check_output("csv", flags.csv, ".csv"), check_output("json", flags.json, ".json")
    hardware, _ = start(flags)

    trained = load_trained(path)
    data = ImageFiles(flags.images, trained.image_size, trained.mean, trained.std, flags.batch_size)
    found = Predictions(data, class_names, flags.top, flags.quiet)
    trainer = make_trainer(flags, hardware, flags.precision or precision, [found])
    trainer.predict(Classifier(trained.network, num_classes=len(class_names)), data, return_predictions=False)
    if trainer.is_global_zero:
        report(found, path, csv_file, json_file)


if __name__ == "__main__":
    with exit_codes():
        main()

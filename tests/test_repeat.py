"""scripts/repeat.py as a person runs it: several seeds, killed and begun again."""

import json
import math
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from project.errors import UsageError
from project.run.repeat import FIGURES, Repeats
from project.run.repeat_flags import check_places, check_seeds, setting_of, split_command
from tests.conftest import ROOT, python
from tests.survival import FLAGS, Command, wait_for

REPEAT = ROOT / "scripts" / "repeat.py"
SHORT = [*FLAGS, "--max_epochs", "2", "--data.cache_dir", "cache"]


def repeat(cwd: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return python(REPEAT, *args, cwd=cwd)


def run_of(place: Path, seed: int) -> Path:
    return place / "logs" / f"default-seed{seed}" / "version_0"


def summary(place: Path, seed: int) -> dict[str, Any]:
    return json.loads((run_of(place, seed) / "summary.json").read_text())


def identity(place: Path, seed: int) -> dict[str, tuple[int, int]]:
    """Which files a run has, and when each was written."""
    files = sorted(run_of(place, seed).rglob("*"))
    return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files if file.is_file()}


def last(place: Path, seed: int) -> dict[str, Any]:
    return torch.load(run_of(place, seed) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_three_seeds_give_the_mean_and_the_deviation_of_three_runs_once(tmp_path: Path) -> None:
    result = repeat(tmp_path, "--seeds", 3, "--", *SHORT)
    assert result.returncode == 0, result.stderr
    runs = [summary(tmp_path, seed) for seed in range(3)]
    assert len({run["test_loss"] for run in runs}) == 3
    results = json.loads((tmp_path / "logs" / "default-seeds.json").read_text())
    for name in FIGURES:
        values = [run[name] for run in runs]
        assert results["mean"][name] == pytest.approx(statistics.mean(values))
        assert results["standard_deviation"][name] == pytest.approx(statistics.stdev(values))
        assert results["n"][name] == 3
    *_, mean, deviation, saved = result.stdout.splitlines()
    assert mean.split()[:2] == ["mean", f"{results['mean']['test_accuracy']:.4f}"]
    assert deviation.split()[:2] == ["deviation", f"{results['standard_deviation']['test_accuracy']:.4f}"]
    assert mean.split()[2] == f"{results['mean']['test_loss']:.4f}"
    assert deviation.endswith("(n = 3)")
    assert saved == "saved  logs/default-seeds.json"

    before = [identity(tmp_path, seed) for seed in range(3)]
    again = repeat(tmp_path, "--seeds", 3, "--", *SHORT)
    assert again.stdout.splitlines()[0] == "3 of 3 seeds were done before"
    assert again.stdout.splitlines()[-3:] == [mean, deviation, saved]
    assert [identity(tmp_path, seed) for seed in range(3)] == before

    other = repeat(tmp_path, "--seeds", 3, "--", *SHORT, "--lr", "0.2")
    assert other.returncode == 2
    assert "its seeds were trained without --lr 0.2" in other.stderr
    assert other.stderr.count("\n") == 1
    assert [identity(tmp_path, seed) for seed in range(3)] == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc, as Linux has it")
def test_killed_in_its_second_seed_it_repeats_nothing_that_was_done(tmp_path: Path) -> None:
    flags = [*FLAGS, "--max_epochs", "5", "--data.cache_dir", str(tmp_path / "cache"), "--checkpoint_every", "5"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert repeat(whole, "--seeds", 2, "--", *flags).returncode == 0
    arguments = [str(REPEAT), "--seeds", "2", "--", *map(str, flags)]
    with Command(killed, program=arguments) as command:
        second = run_of(killed, 1) / "checkpoints" / "last.ckpt"
        wait_for(lambda: second.exists() and torch.load(second, weights_only=True)["global_step"] > 100, 120)
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait(60) == 137  # and no process is left
    done = identity(killed, 0)
    steps = torch.load(second, weights_only=True)["global_step"]
    assert 100 < steps < 5 * 84
    with Command(killed, program=arguments) as command:
        assert command.wait() == 0, command.output
        assert "1 of 2 seeds were done before" in command.output
        assert f"resume: from step {steps}, " in command.output
        assert "(n = 2)" in command.output
    assert identity(killed, 0) == done
    for seed in (0, 1):
        one, other = last(whole, seed), last(killed, seed)
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.slow
def test_two_at_once_are_the_same_two_runs(tmp_path: Path) -> None:
    for name, at_once in (("apart", 1), ("beside", 2)):
        (tmp_path / name).mkdir()
        result = repeat(tmp_path / name, "--seeds", 2, "--at_once", at_once, "--", *SHORT)
        assert result.returncode == 0, result.stderr
    for seed in (0, 1):
        one, other = last(tmp_path / "apart", seed), last(tmp_path / "beside", seed)
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())
        text = (tmp_path / "beside" / "logs" / f"default-seed{seed}.txt").read_text()
        assert re.search(r"^tested +accuracy", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_mistake_in_the_flags_of_train_ends_all_with_its_line(at_once: int, tmp_path: Path) -> None:
    start = time.monotonic()
    result = repeat(tmp_path, "--seeds", 2, "--at_once", at_once, "--", *SHORT, "--batch_size", "9000")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: --batch_size 9000")
    assert "Traceback" not in result.stderr
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_a_seed_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    callback = "--trainer.callbacks"
    failing = [callback, "tests.programs.failing.Fail", f"{callback}.how", "raise", f"{callback}.rank", "0"]
    result = repeat(tmp_path, "--seeds", 2, "--", *SHORT, *failing)
    assert result.returncode == 1
    assert "2 of 2 seeds failed: seed 0 failed, exit code 1" in result.stderr.splitlines()[-1]
    assert "(n = 0)" in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "3"], "-- is missing"),
        (["--", "--seed", "3"], "--seed 3 after --: say which seeds"),
        (["--", "--resume"], "--resume after --: leave it out"),
        (["--", "--explain"], "--explain after --: leave it out"),
    ],
)
def test_flags_that_cannot_be_repeated_are_refused(args: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        split_command(args)


def test_seeds_and_places_that_cannot_be_are_refused() -> None:
    for count, first in ((0, 0), (1, -1), (2, 2**32 - 1)):
        with pytest.raises(UsageError, match="must be"):
            check_seeds(count, first)
    for at_once, gpus, flags in ((0, None, []), (2, "0", []), (1, "0,0", []), (1, "a", []), (1, "0", ["--devices", "2"])):
        with pytest.raises(UsageError, match=r"--at_once|--gpus"):
            check_places(at_once, gpus, flags)
    assert check_places(1, "0,3", []) == [["--accelerator", "gpu", "--devices", f"{gpu},"] for gpu in (0, 3)]
    assert check_seeds(3, 4) == [4, 5, 6]


def test_its_name_and_folder_may_stand_in_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nlog_dir: elsewhere\n")
    (tmp_path / "empty.yaml").write_text("")
    config = ["--config", str(tmp_path / "mine.yaml")]
    assert setting_of("name", config) == setting_of("name", [*config, "--lr", "0.1"]) == "mine"
    assert setting_of("name", ["--name", "before", *config]) == "mine"
    assert setting_of("name", [*config, "--name=after"]) == "after"
    assert setting_of("name", [f"--config={tmp_path / 'empty.yaml'}"]) == "default"
    assert setting_of("name", ["--config", "is/not/there.yaml"]) == "default"
    assert Repeats(config).file == Path("elsewhere", "mine-seeds.json")


def test_a_loss_that_is_not_finite_has_no_deviation_and_the_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, loss in enumerate((0.5, math.nan)):
        run_of(tmp_path, seed).mkdir(parents=True)
        figures = {"test_accuracy": 0.5 + 0.1 * seed, "test_loss": loss, "val_accuracy": None, "train_seconds": 2.0}
        (run_of(tmp_path, seed) / "summary.json").write_text(json.dumps(figures))
    repeats = Repeats([])
    repeats.seeds = [0, 1]
    results = repeats.save()
    assert results["standard_deviation"]["test_accuracy"] == pytest.approx(0.1 / math.sqrt(2))
    assert results["standard_deviation"]["test_loss"] is None
    assert math.isnan(results["mean"]["test_loss"])
    assert results["mean"]["val_accuracy"] is None
    assert results["n"] == {"test_accuracy": 2, "test_loss": 2, "val_accuracy": 0, "train_seconds": 2}
    assert repeats.table()[-2].split()[:4] == ["deviation", "0.0707", "-", "-"]

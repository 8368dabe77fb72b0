"""The benchmark measures what it says, and refuses what it cannot."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

# As scripts/benchmark.py names them, whose folder is in its path.
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from benchmarks.measure import MILLISECONDS, SPEED, Row, alternate, figures, over, table
from benchmarks.turns import Program, take_turns

from tests.conftest import ROOT, clean_environment, python
from tests.survival import wait_for

BENCHMARK = ROOT / "scripts" / "benchmark.py"

pytestmark = pytest.mark.alone


def test_sides_are_taken_in_turn_and_begin_with_another_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[str] = []
    sides = {name: lambda name=name: float(taken.append(name) or len(taken)) for name in "abc"}
    samples = alternate("section", sides, 3)
    assert "".join(taken) == "abcbcacab"
    assert samples == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}
    assert capsys.readouterr().out.count("section  round") == 9


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    assert over({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 1.0]}, "a", "b") == 3.0


def test_the_first_epoch_is_left_out() -> None:
    lines = [f"epoch {n}/3  train loss 2.0 accuracy 0.1  {n},000 images/s" for n in (1, 2, 3)]
    output = "\n".join([*lines, "trained   3 epochs, 2025 steps of 8 images on 1 x cpu (single_device): 69 s, 830 images/s"])
    assert figures(SPEED, output) == [2000, 3000]
    assert figures(MILLISECONDS, "step 1 1.500 ms/step\nstep 2 2.5 ms/step") == [2.5]


def test_the_table_names_sections_sides_and_ratios() -> None:
    samples = {"template": [1.0, 3.0, 2.0], "by hand": [1.0, 1.0, 1.0]}
    last = table([Row("step", "tiny network", "µs", samples, ("ratio", 2))]).splitlines()[1]
    assert " ".join(last.split()) == "step tiny network template 2 by hand 1 µs 3 ratio 2"


WORKS = """
import sys, time
for epoch in range(int(sys.argv[1])):
    began, worked = time.perf_counter(), time.process_time()
    while time.process_time() - worked < float(sys.argv[2]):
        pass
    print(f"epoch {epoch} {(time.perf_counter() - began) / (time.process_time() - worked):.4f} of its own time", flush=True)
"""


def test_programs_take_turns_by_clocks_that_stand_still(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two at once, and one twice as long as the other: by a clock that went on it would take some three times its time."""
    (tmp_path / "works.py").write_text(WORKS)
    sides = {str(t): Program([tmp_path / "works.py", 9, t], r"^epoch \d+ ([\d.]+) of") for t in (0.4, 0.8)}
    samples = take_turns("section", sides, epochs=2, starts=2)
    assert [len(values) for values in samples.values()] == [4, 4]
    assert all(0.99 < statistics.median(values) < 1.5 for values in samples.values())
    assert capsys.readouterr().out.count("section  start") == 4


def test_where_a_program_says_no_figure_its_seconds_are_taken(tmp_path: Path) -> None:
    (tmp_path / "works.py").write_text(WORKS)
    sides = {str(t): Program([tmp_path / "works.py", 9, t], r"^epoch \d+ ") for t in (0.4, 0.8)}
    samples = take_turns("section", sides, epochs=3)
    assert 0.4 < statistics.median(samples["0.4"]) < 0.7
    assert 0.8 < statistics.median(samples["0.8"]) < 1.4


def test_a_program_that_ends_too_soon_ends_the_benchmark_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "works.py").write_text(f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())){WORKS}")
    good = Program([tmp_path / "works.py", 9, 0.2], r"^epoch \d+ ([\d.]+) of")
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        take_turns("section", {"good": good, "bad": Program([tmp_path / "fails.py"], "epoch")}, epochs=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells whose child a process is")
def test_sigterm_ends_the_programs_too_also_stopped_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--only", "step", "--json", str(tmp_path / "figures.json")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=clean_environment()) as benchmark:
        children = wait_for(lambda: [pid for pid, parent in parents().items() if parent == benchmark.pid], 60)
        benchmark.terminate()
        assert benchmark.wait(30) == 143
    assert not set(children) & set(parents())


def parents() -> dict[int, int]:
    """The parent of every process."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "accuracy"], "needs --root"),
        (["--root", "/nowhere"], "--root /nowhere holds no train/"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--repeats", "0"], "must be at least 1"),
    ],
)
def test_a_mistake_is_named(flags: list[str], words: str) -> None:
    result = python(BENCHMARK, *flags)
    assert result.returncode == 2
    assert words in result.stderr


@pytest.mark.slow
def test_quick_runs_and_writes_every_sample_with_machine_and_versions(tmp_path: Path) -> None:
    root, file = tmp_path / "images", tmp_path / "figures.json"
    noise = np.random.default_rng(0)
    for split, count in (("train", 1300), ("test", 20)):
        for name in ("one", "other"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    # The others take the functions of these.
    every = ("step", "input", "communication", "memory", "start", "size", "accuracy", "gpu")
    result = python(BENCHMARK, "--quick", "--only", *every, "--root", root, "--seeds", 0, "--json", file, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    written = json.loads(file.read_text())
    assert written["quick"] is True
    assert "--quick" in written["command"]
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["torch"]
    rows = {(row["section"], row["what"]): row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    assert {section for section, _ in rows} == set(every) - {"gpu"}
    assert "gpu: not measured" in result.stdout
    assert all(value > 0 for row in rows.values() for values in row["samples"].values() for value in values)
    assert set(rows["step", "tiny network"]["samples"]) == {"template", "by hand", "plain Lightning"}
    assert rows["accuracy", "configs/speed.yaml"]["seeds"] == [0]
    shares = rows["memory", "images (PSS, all processes)"]["samples"]
    assert 0.5 < shares["1 process"][0] <= 1.01
    assert 0.5 < shares["2 processes"][0] < shares["1 process"][0] + 0.1

"""scripts/train.sbatch on a real Slurm: it trains, and whatever ends a turn, the run goes on exactly."""

import functools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, clean_environment, train
from tests.slurm import Cluster, cannot
from tests.survival import FLAGS, RUN, TWO, largest_difference, steps_in_tensorboard, steps_saved, wait_for

REASON = cannot()
real = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]


def batch(*flags: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / "train.sbatch"), *map(str, flags)]
    how = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command, cwd=cwd, env=clean_environment(**env), check=False, **how)


def test_outside_slurm_it_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    result = batch("--max_epochs", 1)
    assert result.returncode == 2
    assert result.stderr == (
        "error: this is for Slurm: sbatch scripts/train.sbatch FLAGS; without Slurm: python scripts/train.py"
        " --strategy ddp FLAGS\n"
    )


def test_elsewhere_than_in_the_projects_folder_it_says_so(tmp_path: Path) -> None:
    result = batch(cwd=tmp_path, SLURM_JOB_ID="1")
    assert result.returncode == 2
    assert result.stderr == (
        f"error: scripts/train.py is not in {tmp_path}: submit the job from the project's folder, or with --chdir\n"
    )


def test_a_python_that_is_not_there_is_named() -> None:
    result = batch(SLURM_JOB_ID="1", PYTHON="no-such-python")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "error: no-such-python does not run here: activate its environment above, or set PYTHON"
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: list[str]) -> Callable[[int], Path]:
    """Make the run, of so many epochs, that nothing has ended."""

    @functools.cache
    def make(epochs: int) -> Path:
        place = tmp_path_factory.mktemp("whole")
        train(place, *FLAGS, "--max_epochs", epochs, *TWO, *cache)
        return place

    return make


class Job:
    """scripts/train.sbatch, submitted from a folder that has the project's scripts.

    Args:
        cluster: Where.
        place: The folder.
        options: sbatch's.
        flags: Of scripts/train.py.
    """

    def __init__(self, cluster: Cluster, place: Path, options: list[str], *flags: object) -> None:
        self.cluster, self.place = cluster, place
        (place / "logs").mkdir()
        (place / "scripts").symlink_to(ROOT / "scripts")
        command = ["sbatch", "--parsable", *options, "scripts/train.sbatch", *flags]
        self.number = cluster.run(*command, cwd=place, PYTHON=sys.executable).strip()

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted((self.place / "logs").glob("slurm-*.out")))

    @property
    def state(self) -> str:
        return self.cluster.show(self.number)["JobState"]

    def ends(self) -> None:
        """Wait for its end; a requeued job waits for some seconds instead of Slurm's two minutes.

        At once would be too soon: the machine would take it for the turn that has just ended.
        """
        requeued: dict[str, float] = {}

        def look() -> bool:
            known = self.cluster.show(self.number)
            assert known["JobState"] != "FAILED", self.output
            if known["JobState"] == "PENDING" and known["Restarts"] != "0":
                since = requeued.setdefault(known["Restarts"], time.monotonic())
                if time.monotonic() - since > 4:
                    self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now", check=False)
            return known["JobState"] == "COMPLETED"

        wait_for(look, 240, 0.3)

    def goes_on_exactly(self, whole: Path, epochs: int) -> int:
        """Hold it to the run that nothing has ended; return how often it was requeued."""
        stopped = [int(text) for text in re.findall(r"SIGTERM: stopped after step (\d+), saved", self.output)]
        assert all(0 < step < epochs * 84 for step in stopped), stopped
        assert stopped, self.output
        for step in stopped:
            assert f"resume: from step {step}, {RUN}/checkpoints/last.ckpt" in self.output
        assert not re.search(r"^error|^Traceback|^scontrol|requeue.*(?:error|invalid)", self.output, re.MULTILINE), (
            self.output
        )
        assert largest_difference(whole, self.place) == 0
        assert [run.name for run in sorted((self.place / RUN).parent.iterdir())] == ["version_0"]
        assert steps_in_tensorboard(self.place) == list(range(epochs * 84))
        return int(self.cluster.show(self.number)["Restarts"])


class TestCluster:
    """On the cluster."""

    pytestmark = real

    @pytest.mark.parametrize("command", [["scontrol", "requeue"], ["scancel", "--signal=TERM"]], ids=" ".join)
    def test_what_ends_a_turn_costs_no_step(
        self, command: list[str], cluster: Cluster, whole: Callable[[int], Path], cache: list[str], tmp_path: Path
    ) -> None:
        job = Job(cluster, tmp_path, [], *FLAGS, "--max_epochs", 6, *cache)
        wait_for(lambda: steps_saved(tmp_path) > 0, 90, 0.2)
        cluster.run(*command, job.number)
        job.ends()
        assert job.goes_on_exactly(whole(6), 6) == 1
        assert job.output.count("waits in the queue again") == (command[0] == "scancel")  # Slurm has requeued it itself

    def test_the_time_limit_costs_no_step(
        self, cluster: Cluster, whole: Callable[[int], Path], cache: list[str], tmp_path: Path
    ) -> None:
        """Slurm looks every half minute: the signal comes after 10 to 40 seconds of each turn."""
        turn = ["--time=2", "--signal=TERM@80"]
        job = Job(cluster, tmp_path, turn, *FLAGS, "--max_epochs", 30, *cache)
        job.ends()
        turns = job.goes_on_exactly(whole(30), 30)
        assert turns > 0
        assert job.output.count("waits in the queue again") == turns

    def test_scancel_ends_it_for_good(self, cluster: Cluster, cache: list[str], tmp_path: Path) -> None:
        job = Job(cluster, tmp_path, [], *FLAGS, "--max_epochs", 200, *cache)
        wait_for(lambda: steps_saved(tmp_path) > 0, 90, 0.2)
        cluster.run("scancel", job.number)
        wait_for(lambda: "SIGTERM: stopped after step" in job.output, 30)
        wait_for(lambda: not cluster.run("squeue", "-h", "-j", job.number, check=False), 60, 0.3)
        assert "waits in the queue" not in job.output
        assert job.state == "CANCELLED"
        assert cluster.show(job.number)["Restarts"] == "0"

    def test_jobs_of_an_array_have_a_run_directory_each_and_are_requeued_alone(
        self, cluster: Cluster, whole: Callable[[int], Path], cache: list[str], tmp_path: Path
    ) -> None:
        job = Job(cluster, tmp_path, ["--array=0-1"], *FLAGS, "--max_epochs", 6, *cache)
        # One of them bears the number of the array itself, which stands for both.
        own = wait_for(lambda: {one: cluster.show(f"{job.number}_{one}").get("JobId") for one in (0, 1)}, 30)
        last = next(one for one, number in own.items() if number == job.number)
        wait_for(lambda: all((run / "checkpoints" / "last.ckpt").exists() for run in runs(tmp_path, 2)), 90, 0.2)
        cluster.run("scancel", "--signal=TERM", f"{job.number}_{last}")
        wait_for(lambda: cluster.show(f"{job.number}_{last}")["Restarts"] == "1", 60, 0.3)
        job.number = f"{job.number}_{last}"
        job.ends()
        other = f"{job.number.split('_')[0]}_{1 - last}"
        wait_for(lambda: cluster.show(other)["JobState"] == "COMPLETED", 120, 0.3)
        assert cluster.show(other)["Restarts"] == "0"
        assert [run.name for run in runs(tmp_path, 2)] == ["version_0", "version_1"], job.output
        assert len({(run / ".job").read_text() for run in runs(tmp_path, 2)}) == 2
        assert job.output.count("resume: from step") == job.output.count("waits in the queue again") == 1
        expected = checkpoint(whole(6) / RUN)
        for run in runs(tmp_path, 2):
            found = checkpoint(run)
            assert all(torch.equal(weight, found[name]) for name, weight in expected.items()), run


def runs(place: Path, number: int) -> list[Path]:
    """The run directories, once there are so many."""
    found = sorted((place / RUN).parent.glob("version_*"))
    return found if len(found) >= number else [place / "none"]


def checkpoint(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]

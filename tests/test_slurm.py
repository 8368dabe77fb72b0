"""scripts/train.sbatch on a real Slurm: it trains, and whatever ends a turn, the run goes on exactly."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environment, train
from tests.slurm import Cluster, cannot
from tests.survival import FLAGS, RUN, TWO, largest_difference, steps_in_tensorboard, steps_saved, wait_for

REASON = cannot()
real = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
EPOCHS = 24
LONG = [*FLAGS, "--max_epochs", EPOCHS]
TURN = ["--time=2", "--signal=TERM@60"]  # Slurm's clock strikes every half minute


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
def whole(tmp_path_factory: pytest.TempPathFactory, cache: list[str]) -> Path:
    """The run that nothing has ended."""
    place = tmp_path_factory.mktemp("whole")
    train(place, *LONG, *TWO, *cache)
    return place


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

    def is_in(self, state: str, seconds: float = 120) -> dict[str, str]:
        """Wait until it is in a state; return all that is known of it."""

        def look() -> dict[str, str] | None:
            known = self.cluster.show(self.number)
            assert state in ("FAILED", "CANCELLED") or known["JobState"] != "FAILED", self.output
            return known if known["JobState"] == state else None

        return wait_for(look, seconds, 0.3)

    def goes_on(self) -> None:
        """Have it run again, without the two minutes that Slurm lets a requeued job wait."""
        self.is_in("PENDING")
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")


class TestCluster:
    """On the cluster."""

    pytestmark = real

    def test_what_ends_a_turn_costs_no_step(self, cluster: Cluster, whole: Path, cache: list[str], tmp_path: Path) -> None:
        """The time limit, then a requeue, then scancel --signal, of one job."""
        job = Job(cluster, tmp_path, TURN, *LONG, *cache)
        steps = []
        for turn, command in enumerate(([], ["scontrol", "requeue"], ["scancel", "--signal=TERM"]), start=1):
            before = steps[-1] if steps else 0
            if command:
                wait_for(lambda before=before: steps_saved(tmp_path) > before + 84, 90, 0.2)
                cluster.run(*command, job.number)
            wait_for(lambda turn=turn: job.output.count("SIGTERM: stopped after step") == turn, 90, 0.2)
            steps.append(int(re.findall(r"stopped after step (\d+), saved", job.output)[-1]))
            assert before < steps[-1] < EPOCHS * 84
            job.goes_on()
        known = job.is_in("COMPLETED")
        assert known["Restarts"] == "3"
        assert job.output.count("waits in the queue again") == 2  # by itself, but where Slurm has done it
        for step in steps:
            assert f"resume: from step {step}, {RUN}/checkpoints/last.ckpt" in job.output
        assert not re.search(r"^error|^Traceback|^scontrol|requeue.*(?:error|invalid)", job.output, re.MULTILINE), job.output
        assert largest_difference(whole, tmp_path) == 0
        assert [run.name for run in sorted((tmp_path / RUN).parent.iterdir())] == ["version_0"]
        assert steps_in_tensorboard(tmp_path) == list(range(EPOCHS * 84))

    def test_scancel_ends_it_for_good(self, cluster: Cluster, cache: list[str], tmp_path: Path) -> None:
        job = Job(cluster, tmp_path, [], *LONG, *cache)
        wait_for(lambda: steps_saved(tmp_path) > 0, 90, 0.2)
        cluster.run("scancel", job.number)
        job.is_in("CANCELLED")
        wait_for(lambda: "SIGTERM: stopped after step" in job.output, 30)
        wait_for(lambda: not cluster.run("squeue", "-h", "-j", job.number, check=False), 60, 0.3)
        assert "waits in the queue" not in job.output
        assert job.is_in("CANCELLED")["Restarts"] == "0"

    def test_jobs_of_an_array_have_a_run_directory_each(self, cluster: Cluster, cache: list[str], tmp_path: Path) -> None:
        job = Job(cluster, tmp_path, ["--array=0-1"], *FLAGS, "--max_epochs", 1, *cache)
        wait_for(lambda: not cluster.run("squeue", "-h", "-j", job.number), 120, 0.3)
        runs = sorted((tmp_path / RUN).parent.iterdir())
        assert [run.name for run in runs] == ["version_0", "version_1"], job.output
        assert all((run / "summary.json").exists() for run in runs), job.output
        assert len({(run / ".job").read_text() for run in runs}) == 2
        assert len(list((tmp_path / "logs").glob("slurm-*.out"))) == 2
        assert os.listdir(tmp_path / "logs" / "default" / "version_0" / "checkpoints")

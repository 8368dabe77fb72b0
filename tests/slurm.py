"""A real Slurm cluster of one machine: munged, slurmctld and slurmd of Debian's slurm-wlm, on ports of their own."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.conftest import clean_environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=30
MinJobAge=3600
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def cannot() -> str:
    """Why this machine cannot run one; empty where it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"Slurm is not installed here: no {', '.join(lacking)} (Debian: slurm-wlm munge)"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root can start munged and slurmd as the test does"
    return ""


class Cluster:
    """While entered, the cluster is there, with nothing to do.

    Args:
        place: A folder for all that it writes.
        cpus: Of its one machine, whatever it has.
    """

    def __init__(self, place: Path, cpus: int = 4) -> None:
        self.place = place
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1] for one in sockets]
        for name in ("state", "spool"):
            (place / name).mkdir()
        self.config = place / "slurm.conf"
        self.config.write_text(CONFIG.format(place=place, ports=ports, host=socket.gethostname().split(".")[0], cpus=cpus))
        key = place / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        munge = {name: self.place / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        try:
            self._serve(
                *("munged", "--force", "--foreground", f"--key-file={self.place / 'munge.key'}"),
                *(f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in munge.items()),
            )
            self._until(munge["socket"].exists, 10)
            self._serve("slurmctld", "-D", "-i", "-f", self.config)
            self._serve("slurmd", "-D", "-N", "localhost", "-f", self.config)
            self._until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%t", check=False), 30)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "-u", "root", "--signal=KILL", "--full", check=False)
            self.run("scancel", "-u", "root", check=False)
            self._until(lambda: not self.run("squeue", "-h", check=False), 20)
        self._end()

    def _serve(self, *command: object) -> None:
        with open(self.place / f"{command[0]}.out", "wb") as output:
            self._servers.append(
                subprocess.Popen(
                    [shutil.which(str(command[0])) or str(command[0]), *map(str, command[1:])],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=clean_environment(SLURM_CONF=str(self.config)),
                )
            )

    def _until(self, true: object, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not true():  # type: ignore[operator]
            if time.monotonic() > end:
                logs = [path.read_text(errors="replace")[-1500:] for path in sorted(self.place.glob("*.log"))]
                raise TimeoutError("\n".join(["the cluster is not as it should be", *logs]))
            time.sleep(0.2)

    def _end(self) -> None:
        for server in reversed(self._servers):
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def run(self, *command: object, cwd: Path | None = None, check: bool = True, **environment: str) -> str:
        """Run one of Slurm's commands; return what it printed."""
        done = subprocess.run(
            [str(part) for part in command],
            check=False,
            cwd=cwd or self.place,
            env=clean_environment(SLURM_CONF=str(self.config), **environment),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr}{done.stdout}")
        return done.stdout

    def show(self, job: int | str) -> dict[str, str]:
        """What is known of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", job)))

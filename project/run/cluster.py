"""Ranks that torchrun or Slurm has started: how many there are, where they meet, and what Lightning is told of them."""

import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lightning.fabric.plugins.environments import LSFEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import TCPStore

from project.errors import UsageError
from project.run.checks import Hardware
from project.run.exit import LAUNCHED_BY_US


@dataclass(frozen=True)
class Layout:
    """What another launcher has started.

    Attributes:
        launcher: "torchrun" or "srun".
        processes: Of each machine.
        machines: Their number.
    """

    launcher: str
    processes: int
    machines: int

    @property
    def wants(self) -> str:
        """How one asks the launcher for another number of processes."""
        return "torchrun --nproc_per_node" if self.launcher == "torchrun" else "sbatch --ntasks-per-node"


def launched_from_outside() -> bool:
    """Return whether something else starts the ranks, or has: torchrun, Slurm, another cluster, or a launcher."""
    clusters = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment)
    return "LOCAL_RANK" in os.environ or any(cluster.detect() for cluster in clusters)


def layout() -> Layout | None:
    """Return what torchrun or srun has started; None where it was neither.

    Raises:
        UsageError: Not the same number on every machine, or a job of several tasks that srun has not started.
    """
    if LAUNCHED_BY_US in os.environ:
        return None
    if TorchElasticEnvironment.detect():
        number, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        machines = int(os.environ.get("GROUP_WORLD_SIZE") or number // here)
        return _even(Layout("torchrun", here, machines), number)
    if SLURMEnvironment.detect():
        number, machines = (int(os.environ.get(name, "1")) for name in ("SLURM_NTASKS", "SLURM_NNODES"))
        if number > 1 and "SLURM_STEP_NUM_TASKS" not in os.environ:
            raise UsageError(
                f"this job has {number} tasks, and none was started: write srun before the command, as"
                " scripts/train.sbatch does"
            )
        if number > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise UsageError(f"--ntasks={number} leaves open which machine has how many; give sbatch --ntasks-per-node")
        return _even(Layout("srun", max(1, number // machines), machines), number)
    return None


def _even(found: Layout, number: int) -> Layout:
    if found.processes * found.machines != number:
        raise UsageError(
            f"{found.launcher} has started {number} processes on {found.machines} machines, and here {found.processes};"
            f" every machine needs as many: see {found.wants}"
        )
    return found


def as_launched(devices: int | str | list[int], num_nodes: int, strategy: str) -> tuple[int | str | list[int], int]:
    """Return `--devices` and `--num_nodes` as a launcher has decided them, where the command line leaves them to it."""
    found = layout()
    if found is None:
        return devices, num_nodes
    if str(devices).strip() in ("auto", "-1") and strategy != "dp":
        devices = found.processes
    return devices, found.machines if num_nodes == 1 else num_nodes


def check_launched(hardware: Hardware) -> None:
    """Refuse hardware flags that contradict what a launcher has started.

    Raises:
        UsageError: They do.
    """
    found = layout()
    if found is None:
        return
    processes = f"{found.processes} processes" if found.processes > 1 else "1 process"
    if hardware.strategy == "dp" and found.processes * found.machines > 1:
        raise UsageError(
            f"--strategy dp is one process, and {found.launcher} has started {found.processes * found.machines}; use"
            f" --strategy ddp, or leave {found.launcher} out"
        )
    if hardware.strategy != "dp" and len(hardware.devices) != found.processes:
        number = len(hardware.devices)
        raise UsageError(
            f"--devices {number}: {found.launcher} has started {processes} on this machine; leave --devices out, or give"
            f" {found.wants}={number}"
        )
    if hardware.num_nodes != found.machines:
        flag = "--nnodes" if found.launcher == "torchrun" else "--nodes"
        raise UsageError(
            f"--num_nodes {hardware.num_nodes}: {found.launcher} has started processes on {found.machines}; leave"
            f" --num_nodes out, or give {found.wants.split()[0]} {flag}={hardware.num_nodes}"
        )


def cluster_plugins() -> list[SLURMEnvironment]:
    """Return what a Trainer must be told of the cluster: under Slurm, that it leaves requeuing to scripts/train.sbatch.

    Lightning's own checkpoint for a requeued job would be taken up by every other run of the same log_dir.
    """
    return [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []


class Meeting:
    """Where torchrun's ranks find each other, anew after every restart, and which torchruns have started them.

    torchrun (2.14) keeps one store for all restarts, in which the ranks would find the addresses of those before. A machine
    that joins later finds that store only where TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has torchrun choose another place for
    every start, and keep no store. Nor does torchrun's count of restarts tell which start this is: that machine begins at 0.

    Attributes:
        agents: The torchruns, on rank 0. A job is known by them: from one start to the next one of them has stayed.
    """

    def __init__(self) -> None:
        self.agents: frozenset[str] = frozenset()
        self._store: TCPStore | None = None  # of this start; rank 0's own, while its process lives

    def meet(self, seconds: float = 300.0) -> None:
        """Have rank 0 open a store for this start, and the others find it; under another launcher than torchrun do nothing.

        Args:
            seconds: To wait for rank 0.

        Raises:
            UsageError: It did not come.
        """
        if LAUNCHED_BY_US in os.environ or "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
            return
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        first = os.environ["RANK"] == "0"
        if os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":  # a place of this start's own
            wait = timedelta(seconds=seconds)
            self._store = TCPStore(address, port, is_master=first, timeout=wait, wait_for_workers=False)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # for torch: the store is there
        else:
            agent = TCPStore(address, port, is_master=False)
            self._store = self._open(address, agent, seconds) if first else self._find(address, agent, seconds)
            os.environ["MASTER_PORT"] = str(self._store.port)
        if os.environ["LOCAL_RANK"] == "0":
            own = f"{socket.gethostname()} {os.getppid()} {_started(os.getppid())}"
            self._store.set(f"agent/{os.environ['GROUP_RANK']}", own)
        if first:
            machines = range(int(os.environ["GROUP_WORLD_SIZE"]))
            self.agents = frozenset(self._store.get(f"agent/{number}").decode() for number in machines)

    @staticmethod
    def _open(address: str, agent: TCPStore, seconds: float) -> TCPStore:
        """Open a store, and have torchrun's tell of it."""
        mark, wait = secrets.token_hex(8), timedelta(seconds=seconds)
        store = TCPStore(address, 0, is_master=True, timeout=wait, wait_for_workers=False)
        store.set("mark", mark)
        agent.set("meet", f"{store.port} {mark}")
        return store

    @staticmethod
    def _find(address: str, agent: TCPStore, seconds: float) -> TCPStore:
        """Wait for the store of the rank 0 that lives now: those before have ended, and their stores too."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if agent.check(["meet"]):
                port, mark = agent.get("meet").decode().split()
                with contextlib.suppress(OSError, RuntimeError):
                    with socket.create_connection((address, int(port)), timeout=2):
                        pass
                    store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=2))
                    if store.check(["mark"]) and store.get("mark").decode() == mark:
                        return store
            time.sleep(0.2)
        raise UsageError(f"rank 0, on {address}, has not come within {seconds:g} s; look at its output, and at its network")


def _started(process: int) -> str:
    """Return when a process was started, in the system's own count; empty where that is not told."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


meeting = Meeting()  # of this process


def choose_network() -> None:
    """Have gloo use the network that reaches the other machines, where GLOO_SOCKET_IFNAME does not name one.

    It would take that of this machine's own name, which is often the loopback's address.
    """
    address = os.environ.get("MASTER_ADDR")
    if address is None or "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(answer[20:24]) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return
    except OSError:  # gloo will say what it misses
        return

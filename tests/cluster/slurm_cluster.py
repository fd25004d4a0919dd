"""A real SLURM cluster on this host: munge, a controller and two node daemons with ports and folders of their own."""

import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from lockstep.core.process_control import end_with_parent, environment_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
START_TIMEOUT_S = 60.0
_POLL_S = 0.2
_NULL_DEVICE = os.makedev(1, 3)

# A requeued job waits for its credentials to expire, two minutes by default. By config_overrides nodes may have more
# CPUs than this host.
_CONFIG = """\
ClusterName=lockstep
FirstJobId={first_job_id}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
GresTypes=gpu
ReturnToService=2
KillWait=15
SlurmdTimeout=0
SlurmdParameters=config_overrides
NodeName=node[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=4 Gres=gpu:2
PartitionName=main Nodes=node[0-1] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class SlurmCluster:
    """Two nodes with four CPUs and two (null) GPUs each. ``close`` ends every process of the cluster and its jobs.

    Args:
        folder: for everything that the daemons write; its path must be short, as sockets lie in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which SLURM's commands find this cluster, and no other one."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return others | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str, timeout_s: float = 60.0) -> str:
        """Run one of SLURM's commands and return what it printed."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return what the controller knows of a job."""
        pairs = re.findall(r"(?:^|\s)([A-Z][\w:/]*)=(\S*)", self.command("scontrol", "show", "job", job_id))
        return dict(pairs)

    def step(self, job_id: str) -> str:
        """Return what the controller knows of a job's first step, nothing if it is not under way."""
        words = ["scontrol", "show", "step", f"{job_id}.0"]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60).stdout

    def wait_for(self, job_id: str, done: Callable[[Mapping[str, str]], bool], timeout_s: float) -> dict[str, str]:
        """Wait until a job is as wished, and return what is known of it then."""
        deadline = time.monotonic() + timeout_s
        while not done(job := self.job(job_id)):
            assert time.monotonic() < deadline, f"{job}\n{self.logs()}"
            time.sleep(_POLL_S)
        return job

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until the nodes are free."""
        self.command("scancel", "--user", "root", "--full", "--signal", "KILL")
        self.command("scancel", "--user", "root")
        self._wait_for_nodes()

    def logs(self) -> str:
        """Return the ends of what the daemons logged."""
        parts = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("slurm*.log"))]
        return "\n".join(parts)

    def close(self) -> None:
        """End the daemons and all that they have started."""
        if len(self._daemons) == 4:
            with suppress(Exception):  # whatever it is, the processes must go
                self.cancel_all()
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        # Daemons have children, and jobs may outlive a daemon. All of them know where this cluster's configuration is.
        for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]:
            if pid != os.getpid() and environment_of(pid).get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # as munge wants it
        host = socket.gethostname().partition(".")[0]
        controller_port, first_port = _free_ports(1)[0], _free_ports(2)[0]
        for name in ("state", "spool_node0", "spool_node1"):
            (folder / name).mkdir(parents=True)
        for name in ("gpu0", "gpu1"):
            make_null_device(folder / name)  # a GPU must be a device of some kind
        (folder / "gres.conf").write_text(f"NodeName=node[0-1] Name=gpu File={folder}/gpu[0-1]\n")
        (folder / "slurm.conf").write_text(
            _CONFIG.format(
                folder=folder,
                # Ports for meeting are made of it: two clusters on this host must not have the same jobs.
                first_job_id=1 + secrets.randbelow(19_000),
                host=host,
                controller_port=controller_port,
                first_port=first_port,
                last_port=first_port + 1,
            )
        )
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--seed-file={folder}/munge.seed", *munge
        )
        _wait(lambda: (folder / "munge.socket").exists(), "munged makes no socket")
        self._daemon("slurmctld", "-D")
        for name in ("node0", "node1"):
            self._daemon("slurmd", "-D", "-N", name)
        self._wait_for_nodes()

    def _daemon(self, *words: str) -> None:
        parent = os.getpid()
        with (self.folder / f"{words[0]}_{len(self._daemons)}.output").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    words,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    start_new_session=True,
                    preexec_fn=lambda: end_with_parent(signal.SIGTERM, parent),  # if the tests are killed
                )
            )

    def _wait_for_nodes(self) -> None:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]

        def idle() -> bool:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
            return done.stdout.split() == ["idle", "idle"]

        _wait(idle, lambda: f"the nodes do not become idle\n{self.logs()}")


def make_null_device(path: Path) -> None:
    """Make what /dev/null is; ``PermissionError`` where the kernel lets root make none."""
    os.mknod(path, 0o666 | stat.S_IFCHR, _NULL_DEVICE)


def _wait(condition: Callable[[], bool], problem: str | Callable[[], str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(problem if isinstance(problem, str) else problem())
        time.sleep(_POLL_S)


def _free_ports(count: int) -> list[int]:
    """Return that many neighbouring ports that are free now, below those that the system hands out."""
    for _ in range(200):
        first = 12000 + secrets.randbelow(18000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("0.0.0.0", port))
            return list(range(first, first + count))
    raise RuntimeError("no free ports")

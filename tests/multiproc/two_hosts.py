"""Two hosts for tests: network namespaces joined by a cable, which can be cut."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multiproc.commands import own_environment

PORT = 29411  # in a namespace of its own any port is free

NEEDED = [
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="the command ip is missing (package iproute2)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces takes root"),
]


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    interface: str
    address: str

    def start(self, *command: str, folder: Path, **environment: str) -> "subprocess.Popen[str]":
        """Run a command on this host; its session is its own, so that it can be ended with all it has started."""
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=folder,
            env=own_environment({"XDG_CACHE_HOME": str(folder / "cache")} | environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def plug(self, is_in: bool) -> None:
        """Cut this host's cable, or mend it."""
        _ip("-n", self.name, "link", "set", self.interface, "up" if is_in else "down")

    def pids(self) -> list[int]:
        """Return the processes that run on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill_all(self) -> None:
        """Kill every process of this host at once."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


def run_all(processes: "Sequence[subprocess.Popen[str]]", timeout_s: float) -> list[str]:
    """Return what processes have said once all have ended; those that have not in time are killed."""
    try:
        return [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def joined_hosts() -> Iterator[list[Host]]:
    """Make two hosts that reach one another through a cable; in the end they go, with whatever runs on them."""
    number = os.getpid() % 250
    made = [Host(f"ls{number}h{side}", f"ls{number}v{side}", f"10.77.{number}.{side + 1}") for side in range(2)]
    begun: list[Host] = []
    try:
        for host in made:
            try:
                _ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine lets nobody make network namespaces: {error.stderr.strip()}")
            begun.append(host)
        _ip("link", "add", made[0].interface, "type", "veth", "peer", "name", made[1].interface)
        for host in made:
            _ip("link", "set", host.interface, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.plug(True)
        yield made
    finally:
        for host in begun:
            host.kill_all()
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout

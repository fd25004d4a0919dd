"""A rank's signs of life, from before it meets the others to the end of its process.

Under the launcher a rank beats into the attempt folder, and the launcher looks at the beats. Under a bare torchrun the
ranks of a host beat into a folder of their own below the folder for temporary files, and look at one another's. A
process that is alone beats nowhere.
"""

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.core import beats, stack_dump
from lockstep.core.blame import Limits, process_state
from lockstep.core.leases import Lease, is_old
from lockstep.core.outcome import ATTEMPT_DIR, note_failure
from lockstep.core.process_control import environment_of
from lockstep.distributed.siblings import Siblings
from lockstep.distributed.topology import Topology, from_environment, start_of_node

BEAT_S = 1.0
"""A rank gives a sign of life this often."""
FOLDER_PREFIX = "lockstep-ranks-"

_JOIN_S = 2.0


@dataclass
class Heartbeat:
    """What beats in this process."""

    folder: Path
    rank: int
    restart: int
    siblings: Siblings | None
    """None where the launcher looks after the ranks."""
    is_over: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    """That it beats in."""

    @property
    def has_launcher(self) -> bool:
        """Whether the folder is the launcher's."""
        return not self.folder.name.startswith(FOLDER_PREFIX)

    def run(self) -> None:
        """Beat until it is over."""
        lease = Lease(self.folder)
        while not self.is_over.wait(BEAT_S):
            beats.alive()
            lease.renew(time.monotonic())
            if self.siblings is not None:
                try:
                    self.siblings.look()
                except Exception as error:  # whatever it is, this rank is alive and must go on saying so
                    self.siblings = None
                    say(f"lockstep: warning: rank {self.rank} can't watch over the others: {error!r}")


_heartbeat: Heartbeat | None = None
_ending = threading.Lock()


def begin(environment: Mapping[str, str] = os.environ) -> None:
    """Begin to beat, and to answer requests for a stack; alone, or the second time, do nothing.

    Where no folder can be had, or it is another user's, there are no beats, and nobody is blamed for anything.

    Raises:
        UsageError: LOCKSTEP_HANG_TIMEOUT_S is no number of seconds, or the launcher's variables make no sense.
    """
    global _heartbeat
    if _heartbeat is not None:
        return
    topology, limits = from_environment(environment), Limits.from_environment(environment)
    attempt_dir = environment.get(ATTEMPT_DIR)
    if not attempt_dir and topology.world_size == 1:
        return
    folder = Path(attempt_dir) if attempt_dir else _folder_of_job(environment)
    restart = restart_count(environment)
    if folder is None or not beats.open_beats(folder, topology.rank, restart, in_training=False):
        return
    stack_dump.answer(stack_dump.stack_path(folder, topology.rank))
    siblings = None if attempt_dir or limits.is_off else _siblings(folder, topology, restart, limits)
    _heartbeat = Heartbeat(folder, topology.rank, restart, siblings)
    _heartbeat.thread = threading.Thread(target=_heartbeat.run, name="lockstep-heartbeat", daemon=True)
    _heartbeat.thread.start()
    if not attempt_dir:
        atexit.register(end)


def current() -> Heartbeat | None:
    """Return what beats in this process, if anything does."""
    return _heartbeat


def note_own_failure() -> None:
    """Let the other ranks of this host know that this one has failed; under the launcher torchrun's agent does so."""
    if _heartbeat is not None and not _heartbeat.has_launcher:
        note_failure(_heartbeat.folder, _heartbeat.restart)


def end() -> None:
    """Beat no more and take away what is left of it; the last rank of a host takes the folder away.

    Under the launcher the last beat stays where it is, which tells how far the rank came. Several threads may end the
    process at once, each in its own way; none returns from here, and goes on to that, before all is taken away.
    """
    global _heartbeat
    with _ending:
        ended, _heartbeat = _heartbeat, None
        if ended is None:
            return
        ended.is_over.set()
        beats.close_beats()
        if not ended.has_launcher:
            if ended.thread is not None and ended.thread is not threading.current_thread():
                ended.thread.join(_JOIN_S)  # it may be about to write into the folder
            with contextlib.suppress(OSError):
                (ended.folder / f"{beats.FILE_PREFIX}{ended.rank}").unlink()
            if not _is_used(ended.folder):
                shutil.rmtree(ended.folder, ignore_errors=True)


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often torchrun had restarted the ranks when this one started; 0 without torchrun."""
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def say(line: str) -> None:
    """Show a line on stderr, from whatever thread; what the main thread does with ``sys.stderr`` is not waited for."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


def _siblings(folder: Path, topology: Topology, restart: int, limits: Limits) -> Siblings:
    return Siblings(folder, topology.rank, restart, topology.world_size, limits, say)


def _folder_of_job(environment: Mapping[str, str]) -> Path | None:
    """Return the folder that the ranks of this job share on this host; None if it can't be had or is not ours."""
    root = Path(tempfile.gettempdir())
    _remove_leftovers(root)
    identity = [start_of_node(environment), str(os.getuid()), *_starter()]
    folder = root / f"{FOLDER_PREFIX}{hashlib.sha256(' '.join(identity).encode()).hexdigest()[:32]}"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return folder
    return None


def _starter() -> list[str]:
    """Return what tells the process that started this host's ranks, torchrun's agent say, from any other.

    It is the nearest ancestor without a RANK, in its system of processes: folders for temporary files may be shared by
    hosts and containers, which number their processes and count their time each on its own.
    """
    import psutil  # type: ignore[import-untyped]  # not before it is needed: every command imports this module

    found = [_read("/proc/sys/kernel/random/boot_id")]
    with contextlib.suppress(OSError):
        found.append(str(Path("/proc/self/ns/pid").readlink()))
    with contextlib.suppress(psutil.Error, OSError):
        starter = next(one for one in psutil.Process().parents() if "RANK" not in environment_of(one.pid))
        found += [str(starter.pid), str(starter.create_time())]
    return found


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _is_used(folder: Path) -> bool:
    """Return whether a process is left of those that beat into a folder."""
    return any(process_state(beat.pid) != "gone" for beat in beats.read_beats(folder).values())


def _remove_leftovers(root: Path) -> None:
    """Remove this user's folders of jobs that were killed, once they are a day old; those of jobs that live are not."""
    with contextlib.suppress(OSError):
        for folder in root.glob(f"{FOLDER_PREFIX}*"):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and is_old(status.st_mtime) and not _is_used(folder):
                shutil.rmtree(folder, ignore_errors=True)

"""A soak: one training of several ranks that is disturbed again and again, and what must hold after every fault.

Used by a test, with few faults, and by ``benchmarks/soak.py`` with many.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, get_args

import psutil  # type: ignore[import-untyped]

from lockstep.core.beats import Beat, read_beat, read_beats
from tests.multiproc import soak_faults
from tests.multiproc.commands import wait_for
from tests.multiproc.soak_files import FilesWatch, compare

Kind = Literal["kill", "stop", "terminate", "exception", "nan"]
KINDS: tuple[Kind, ...] = get_args(Kind)

TASK = "cartpole_classic"
SETTINGS = (
    "--num_envs", "8", "--agent.num_steps_per_env", "8", "--agent.num_learning_epochs", "2",
    "--agent.actor_hidden_dims", "16", "--agent.critic_hidden_dims", "16", "--env.max_episode_steps", "50",
    "--evaluation.interval", "0", "--logger", "none", "--device", "cpu", "--dtype", "float64",
    "--checkpoints.interval", "3", "--sentinel_interval", "5",
)  # fmt: skip
BOUND_S = 30.0
"""Within this time an attempt must have ended."""
MARGIN_S = 30.0
"""What a busy machine may take beyond it, and what the ranks take to start again."""
PATIENCE_S = 120.0
"""For whatever has no bound of its own."""

_SIGNALS: dict[str, signal.Signals] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_BLAMED = re.compile(r"^lockstep: (?:error|warning): rank (\d+) \((local rank [^)]*)\) (.*)", re.MULTILINE)
_NOT_FINITE = re.compile(r"not finite in iteration \d+: .* on rank (\d+);")
_EXIT_CODES: dict[Kind, int] = {"kill": 128 + signal.SIGKILL, "stop": 1, "terminate": 75, "exception": 1, "nan": 1}
_MIN_ITERATIONS = 5
_RESTART = "lockstep: the ranks start again"


@dataclass(frozen=True)
class Fault:
    """What is done to which rank, and when."""

    kind: Kind
    rank: int
    num_iterations: int
    """That the attempt has made by then, at the least; 0 for a fault while the ranks of a new launch start."""
    pause_s: float
    """After that, so that the fault comes at any instant."""
    phase: Literal["rollout", "update"]
    """Of an exception; the others come in whatever phase the rank is in."""


def draw(randomness: random.Random, kind: Kind, num_ranks: int) -> Fault:
    """Return a fault at a random instant on a random rank."""
    is_early = kind in ("kill", "stop") and randomness.random() < 0.3
    return Fault(
        kind,
        randomness.randrange(num_ranks),
        # More than a checkpoint away from the last fault, so that there is progress.
        0 if is_early else randomness.randint(_MIN_ITERATIONS, 12),
        randomness.uniform(0.0, 3.0 if is_early else 0.2),
        randomness.choice(("rollout", "update")) if kind == "exception" else "rollout",
    )


@dataclass
class Account:
    """What a fault led to."""

    fault: Fault
    end: Literal["restarted", "ended"] = "ended"
    took_s: float = 0.0
    """From the fault to the end of the attempt."""
    said: str = ""
    """By the launcher, and the ranks on its screen."""
    misblamed: list[str] = field(default_factory=list)
    """What is wrong with that."""
    unreadable: list[str] = field(default_factory=list)
    """Files, at any instant since the fault before."""
    other: list[str] = field(default_factory=list)
    """What else should not have happened."""

    @property
    def wrong(self) -> list[str]:
        """All of it."""
        return self.misblamed + self.unreadable + self.other


class Launch:
    """A launcher at work in the soak's folder."""

    def __init__(self, folder: Path, num_ranks: int, words: Sequence[str]) -> None:
        self._said = folder / "stderr.txt"
        self.offset = self._said.stat().st_size if self._said.exists() else 0
        with self._said.open("ab") as errors, (folder / "stdout.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "train_multigpu", TASK, *words, "--num_gpus", str(num_ranks)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=folder,
                env=os.environ
                | {
                    "PYTHONPATH": str(folder / "modules"),
                    "SOAK_FOLDER": str(folder),
                    "TMPDIR": str(folder / "tmp"),
                    "XDG_CACHE_HOME": str(folder / "cache"),
                },
                start_new_session=True,
            )

    def said(self) -> str:
        """Return what launcher and ranks have said since ``offset``."""
        with self._said.open("rb") as file:
            file.seek(self.offset)
            return file.read().decode(errors="replace")

    def skip(self) -> None:
        """From now on leave out what was said so far."""
        self.offset = self._said.stat().st_size


class Soak:
    """Trains once undisturbed and once through all faults.

    Args:
        folder: empty, for everything that comes of it.
        num_ranks: of the training.
        num_iterations: of it; if the faults need fewer, the rest is done in haste.
        restarts: how often the ranks of a launch may be started again, for each launch that is needed in turn.
    """

    def __init__(self, folder: Path, num_ranks: int, num_iterations: int, restarts: Sequence[int] = (100,)) -> None:
        self.folder, self.num_ranks, self.num_iterations = folder, num_ranks, num_iterations
        self._restarts = cycle(restarts)
        self._launch: Launch | None = None
        for name in ("tmp", "modules"):
            (folder / name).mkdir(parents=True)
        shutil.copy(soak_faults.__file__, folder / "modules" / "sitecustomize.py")

    def run(self, faults: Sequence[Fault], tell: Callable[[Account], object] = print) -> list[Account]:
        """Commit the faults one after the other; return what came of each, and of the whole training in the last.

        Args:
            faults: in their order.
            tell: is given each account as soon as it is there.
        """
        hurry = self.folder / "hurry"
        try:
            hurry.touch()
            undisturbed = self._finish("--log_root", "undisturbed")
            hurry.unlink()
            with FilesWatch(self.folder / "logs" / TASK) as files:
                accounts = []
                for fault in faults:
                    accounts.append(self._commit(fault, files))
                    tell(accounts[-1])
                hurry.touch()
                self._continue()
                self._end(PATIENCE_S)
            last = accounts[-1]
            last.other += [f"the run ended with exit code {self._code}"] if self._code else []
            last.other += compare(undisturbed, self._runs()[0], self.num_iterations)
            last.unreadable += files.look_at_all()
            return accounts
        finally:
            self.close()

    def close(self) -> None:
        """End every process that is left; there should be none."""
        for process in self.processes():
            process.kill()
        if self._launch is not None:
            self._launch.process.wait(PATIENCE_S)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the soak's trainings."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.cwd() == str(self.folder):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    # --- launching ---------------------------------------------------------------------------------------------------

    def _finish(self, *more: str) -> Path:
        """Train from the start to the end; return the run directory."""
        self._launch = Launch(self.folder, self.num_ranks, (*self._words(), *more))
        self._end(PATIENCE_S)
        assert self._code == 0, self._launch.said()
        (run,) = (self.folder / more[-1] / TASK).iterdir()
        return run

    def _words(self) -> tuple[str, ...]:
        return (*SETTINGS, "--max_iterations", str(self.num_iterations))

    def _continue(self) -> bool:
        """Start the training, or go on with it, if it is not under way; return whether that took a new launch."""
        if self._launch is not None and self._launch.process.poll() is None:
            return False
        runs = self._runs()
        words = ("--resume", str(runs[0])) if runs else self._words()
        more = ("--max_restarts", str(next(self._restarts)), "--hang_timeout", "5")
        self._launch = Launch(self.folder, self.num_ranks, (*words, *more))
        return True

    def _runs(self) -> list[Path]:
        """Return the directory of the run; nothing before there is one."""
        runs = list((self.folder / "logs" / TASK).glob("[!.]*"))
        assert len(runs) < 2, runs
        return runs

    def _read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self._runs()[0] / name).read_text())
        return content

    @property
    def _code(self) -> int | None:
        return None if self._launch is None else self._launch.process.poll()

    def _end(self, timeout_s: float) -> None:
        assert self._launch is not None
        try:
            self._launch.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s:.0f} s:\n{self._launch.said()}") from None

    # --- faults ------------------------------------------------------------------------------------------------------

    def _commit(self, fault: Fault, files: FilesWatch) -> Account:
        is_early = self._continue() and fault.num_iterations == 0 and bool(self._runs())
        num_iterations = max(fault.num_iterations, _MIN_ITERATIONS)
        assert self._launch is not None
        beats = wait_for(
            self._beats if is_early else lambda: self._beats_after(num_iterations), "beating ranks", PATIENCE_S
        )
        time.sleep(fault.pause_s)
        self._launch.skip()
        num_attempts = self._num_attempts()
        phase = self._strike(fault, beats[fault.rank])
        account = self._follow(Account(fault), num_attempts)
        account.said = self._launch.said()
        account.misblamed += blame(account, phase, beats[fault.rank].pid)
        account.unreadable += files.take_problems()
        if account.end == "ended":
            account.other += self._left_behind(fault.kind, is_early)
        return account

    def _strike(self, fault: Fault, beat: Beat) -> str:
        """Do it; return the phase that the rank was in, empty if it is not known."""
        number = _SIGNALS.get(fault.kind)
        if number is not None:
            os.kill(beat.pid, number)
            then = read_beat(self._attempt_dir() / f"beat_{fault.rank}")
            return then.phase if then else ""
        order = self.folder / "planted.json"
        (self.folder / "struck.json").unlink(missing_ok=True)
        temporary = order.with_suffix(".tmp")
        temporary.write_text(json.dumps({"kind": fault.kind, "rank": fault.rank, "phase": fault.phase}))
        temporary.rename(order)
        wait_for((self.folder / "struck.json").exists, "the planted fault", PATIENCE_S)
        return fault.phase

    def _follow(self, account: Account, num_attempts: int) -> Account:
        """Wait until the job has ended or resumed."""
        assert self._launch is not None
        began = time.monotonic()
        while time.monotonic() - began < BOUND_S + MARGIN_S:
            has_ended = self._launch.process.poll() is not None
            if not account.took_s and (has_ended or _RESTART in self._launch.said()):
                account.took_s = time.monotonic() - began
            if has_ended:
                return account
            if account.took_s and self._num_attempts() > num_attempts:
                account.end = "restarted"
                return account
            time.sleep(0.05)
        account.took_s = time.monotonic() - began
        account.other.append(f"neither ended nor resumed within {BOUND_S + MARGIN_S:.0f} s")
        self.close()
        return account

    def _attempt_dir(self) -> Path:
        """Return the folder of the launch under way; what earlier ones have left are logs alone."""
        return next((self.folder / "tmp").glob("lockstep-*/attempt"))

    def _beats(self) -> dict[int, Beat]:
        """Return the beats of all ranks of the launch under way once all of them beat, else nothing."""
        assert self._launch is not None
        assert self._code is None, f"it ended with {self._code}: {self._launch.said()}"
        try:
            beats = read_beats(self._attempt_dir())
        except StopIteration:
            return {}
        is_whole = len(beats) == self.num_ranks and all(psutil.pid_exists(beat.pid) for beat in beats.values())
        return beats if is_whole else {}

    def _beats_after(self, num_iterations: int) -> dict[int, Beat]:
        """Return the beats of all ranks once the attempt under way has made so many iterations, else nothing."""
        beats = self._beats()
        if not beats or not self._runs():
            return {}
        attempt = self._read("run.json")["attempts"][-1]
        are_far = all(
            beat.restart == attempt["restart"] and beat.iteration >= attempt["iteration"] + num_iterations
            for beat in beats.values()
        )
        return beats if are_far else {}

    def _num_attempts(self) -> int:
        return len(self._read("run.json")["attempts"])

    def _left_behind(self, kind: Kind, is_early: bool) -> list[str]:
        """Return what is not as it should be after the end of a launch; an early one may not have touched the run."""
        progress = self._read("progress.json")
        wrong = [f"{process} is left" for process in self.processes()]
        if self._code != _EXIT_CODES[kind]:
            wrong.append(f"exit code {self._code}, not {_EXIT_CODES[kind]}")
        if progress["status"] != ("preempted" if kind == "terminate" else "failed") and not is_early:
            wrong.append(f"status {progress['status']}")
        if kind == "terminate" and progress["checkpoint"] != f"checkpoints/model_{progress['iteration']}.pt":
            wrong.append(f"preempted at iteration {progress['iteration']} with {progress['checkpoint']}")
        return wrong


def blame(account: Account, phase: str, pid: int) -> list[str]:
    """Return what is wrong with what was said of a fault on the rank with this process, in this phase."""
    fault, said = account.fault, account.said
    blamed = _BLAMED.findall(said)
    if fault.kind == "terminate":
        return [f"blamed rank {rank} for a preemption: {what}" for rank, _, what in blamed]
    if fault.kind == "nan":
        ranks = {int(rank) for rank in _NOT_FINITE.findall(said)}
        return [] if ranks == {fault.rank} else [f"named {sorted(ranks)} for NaN on rank {fault.rank}: {said}"]
    if [int(rank) for rank, _, _ in blamed] != [fault.rank]:
        return [f"blamed {[rank for rank, _, _ in blamed]} for {fault}: {said}"]
    ((_, place, what),) = blamed
    words = {"kill": "was killed by SIGKILL", "stop": "was stopped by a signal", "exception": ""}[fault.kind]
    wrong = [] if words in what else [f"not {words}: {what}"]
    if fault.kind == "exception" and "LookupError: planted by the soak" not in said:
        wrong.append(f"no traceback: {said}")
    if not place.endswith(f", cpu, pid {pid}"):
        wrong.append(f"not of process {pid}: {place}")
    if f"phase {phase}" not in what:
        wrong.append(f"not in phase {phase}: {what}")
    return wrong

"""Who is compared, and the process of each."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workload import Workload

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]


@dataclass(frozen=True)
class Contender:
    """A library, the settings of its side, and whether glibc was told to keep large buffers (as lockstep does).

    ``differs`` is what it does otherwise than the workload says, or than the other sides. A side with the setting
    ``compiled`` trains with networks that torch compiles, by g++ or whatever ``CXX`` names.
    """

    library: str
    settings: dict[str, Any] = field(default_factory=dict)
    keep_large_buffers: bool = True
    differs: str = ""


RSL_RL = "one permutation of the samples for all epochs"
RL_GAMES = "the same minibatches of whole envs in every epoch, statistics of observations from every minibatch"
SKRL = (
    "learning rate adapted once per epoch, the value of the next episode's start where time was up, statistics of "
    "observations from every minibatch of the first epoch"
)
SB3 = "fixed learning rate, advantages normalised per minibatch, statistics of observations from every env step"
CONTENDERS = {
    "lockstep": Contender("lockstep"),
    "lockstep_default_malloc": Contender("lockstep", keep_large_buffers=False),
    "lockstep_jax": Contender("lockstep_jax"),
    "rsl_rl": Contender("rsl_rl", differs=RSL_RL),
    "rsl_rl_compiled": Contender("rsl_rl", {"compiled": True}, differs=RSL_RL),
    "rsl_rl_same_env": Contender("rsl_rl", {"env": "same"}, differs=RSL_RL),
    "rsl_rl_default_malloc": Contender("rsl_rl", keep_large_buffers=False, differs=RSL_RL),
    "rl_games": Contender("rl_games", {"compiled": True}, differs=RL_GAMES),  # its default
    "rl_games_not_compiled": Contender("rl_games", differs=RL_GAMES),
    "skrl": Contender("skrl", differs=SKRL),
    "skrl_compiled": Contender("skrl", {"compiled": True}, differs=SKRL),
    "sb3": Contender("sb3", differs=SB3),
    "sb3_compiled": Contender("sb3", {"compiled": True}, differs=SB3),
    "brax": Contender("brax", differs="fixed learning rate, rewards x 0.1, values not clipped"),
}


def set_up(names: Sequence[str]) -> None:
    """Make the environments of contenders where they are missing; end the command if something else is."""
    compiled = [name for name in names if CONTENDERS[name].settings.get("compiled")]
    compiler = os.environ.get("CXX", "g++")
    if compiled and not shutil.which(compiler):
        raise SystemExit(
            f"{', '.join(compiled)}: torch compiles for these, and there is no '{compiler}'; install one, or name "
            "the --sides without them"
        )
    for name in names:
        python_of(CONTENDERS[name].library)


class Worker:
    """A contender's process, which works only while it is asked; what it says otherwise is kept for a failure.

    Args:
        name: of the contender.
        core: that it runs on.
        workload: what it trains.
        warm_up: iterations after the first before it is ready; 0: it is ready when it is built.
    """

    def __init__(self, name: str, core: int, workload: Workload, *, warm_up: int = 0) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
        # What lockstep keeps of JAX for the next start would be compiled on the peers' side only.
        nothing_kept = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        if not warm_up:  # compiling is counted
            nothing_kept["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        self._process = subprocess.Popen(
            [python_of(CONTENDERS[name].library), FOLDER / "worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | one_thread | nothing_kept,
        )
        preparation = {"core": core, "warm_up": warm_up, "workload": asdict(workload)}
        self.description = self.ask(asdict(CONTENDERS[name]) | preparation)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request, wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            raise SystemExit(f"{self._said.read()}\n{self.name} ended with exit code {code}; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._said.close()


def python_of(library: str) -> Path:
    """Return the interpreter of a library; a peer's environment is made if it is missing or older than its list."""
    if library.startswith("lockstep"):
        return Path(sys.executable)
    requirements, venv = FOLDER / f"requirements-{library}.txt", FOLDER / ".venv" / library
    python, stamp = venv / "bin" / "python", venv / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < requirements.stat().st_mtime:
        print(f"setting up {venv.relative_to(REPOSITORY)}; this happens once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        install: list[str | Path] = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*install, "--requirement", requirements], check=True)
        subprocess.run([*install, "--no-deps", "--editable", REPOSITORY], check=True)
        stamp.touch()
    return python

"""The same tasks, seeds and settings through lockstep's PPO and through RSL-RL's: what is learned, and how fast.

    .venv/bin/python benchmarks/rsl_rl_beside_ours.py curves --save
    .venv/bin/python benchmarks/rsl_rl_beside_ours.py speed --save

``curves``: each seed is a ``lockstep train`` by either library in turn, with the task's recipe. What is compared are
evaluations of the most likely actions over the same episodes: the mean over seeds and its 95 % interval (Student's t),
at each evaluation and of the area under the curve. The command fails if the two areas' difference is surely not 0. What
the networks begin with decides much of the first iterations, so RSL-RL's get the last layers that lockstep's have; a
third curve shows it with its own. A seed that is finished under ``--log_root`` is not run again, so it may be done in
several goes. Flags that this script does not know are handed to ``lockstep train``.

``speed``: three processes on one core train in rounds that take turns: lockstep's PPO, RSL-RL's through lockstep
(``--rl_library rsl_rl``), and RSL-RL's own runner, as a user's script has it, on lockstep's envs. Ratios are taken
round by round. All are started anew ``--starts`` times, since how fast a process is depends on the memory it was given.

With ``--save`` results go to ``benchmarks/guests/rsl_rl_{curves,speed}_<task>.{json,png}``, otherwise to a temporary
folder that is named at the end.

With equal settings the two still differ in what ``DIFFERENCES`` names.
"""

import argparse
import contextlib
import datetime
import io
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).parent))
from learning_curves import records_of, train

from lockstep.core.environment import describe
from lockstep.core.runs import progress_of

matplotlib.use("Agg")

HERE = Path(__file__).parent
_START = [f"--library.{name}.class_name=rsl_rl_models:StartsAsLockstep" for name in ("actor", "critic")]
CURVES = {
    "lockstep": ["--rl_library", "lockstep"],
    "rsl_rl": ["--rl_library", "rsl_rl", *_START],
    "rsl_rl_own_start": ["--rl_library", "rsl_rl"],
}
"""By name, the flags; the first two are compared."""
SIDES = ("lockstep", "rsl_rl", "rsl_rl_runner")
INTERVALS = {"cartpole_balance": 5, "cartpole_swingup": 10}
"""Iterations between evaluations."""
DIFFERENCES = {
    "start": "rsl_rl_own_start alone: torch's own; lockstep: last layers orthogonal, gains 0.01 and 1, biases 0",
    "clipping": "lockstep: the gradient of both networks together; RSL-RL: that of each network",
    "minibatches": "lockstep: dealt anew for each epoch; RSL-RL: once for all epochs of an update",
    "learning rate": "lockstep: a first divergence, 0 but for rounding, is small; RSL-RL: only if it rounds above 0",
    "normaliser": "until the first rollout is over, lockstep: x; RSL-RL: x / 1.01",
    "noise": "lockstep: a stream for each env; RSL-RL: torch's generator",
}
Curve = dict[int, float]


# --- curves ----------------------------------------------------------------------------------------------------------


def finished_run(folder: Path, seed: int) -> Path | None:
    """Return the run of a seed that is finished already."""
    return next((run for run in folder.glob(f"*_seed{seed}") if progress_of(run).get("status") == "finished"), None)


def curves_of(task: str, seeds: Sequence[int], log_root: Path, extra: list[str]) -> dict[str, dict[int, Curve]]:
    """Train each way in turn; return evaluations by name, seed and env steps."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    found: dict[str, dict[int, Curve]] = {name: {} for name in CURVES}
    interval = ["--evaluation.interval", str(INTERVALS.get(task, 10))]
    for seed in seeds:
        for name, own in CURVES.items():
            root = log_root / name
            records = records_of(finished_run(root / task, seed) or train(task, seed, root, [*own, *interval, *extra]))
            found[name][seed] = {
                record["env_steps"]: record["eval/mean_return"]
                for record in records
                if record.get("eval/mean_return") is not None
            }
    return found


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def difference_of(first: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of two means and the ends of its 95 % interval (Welch's)."""
    from scipy.stats import ttest_ind

    if statistics.pvariance([*first]) == statistics.pvariance([*other]) == 0.0:
        same = statistics.mean(first) - statistics.mean(other)
        return same, same, same
    ends = ttest_ind(first, other, equal_var=False).confidence_interval(0.95)
    return statistics.mean(first) - statistics.mean(other), float(ends.low), float(ends.high)


def compare_curves(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, Any]:
    """Return where the two differ, as returns and as areas under the curve (means over the evaluations)."""
    first, other, *_ = curves
    steps = sorted(next(iter(curves[first].values())))
    areas = {name: [statistics.mean(curve.values()) for curve in own.values()] for name, own in curves.items()}
    at = {step: [[curve[step] for curve in curves[name].values()] for name in (first, other)] for step in steps}
    differences = [difference_of(*values) for values in at.values()]
    area = difference_of(areas[first], areas[other])
    return {
        "evaluations": len(steps),
        "evaluations_whose_difference_may_be_0": sum(low <= 0 <= high for _, low, high in differences),
        "mean_return_over_evaluations": {
            name: dict(zip(("mean", "half_of_interval"), map(_rounded, interval_of(own)), strict=True))
            for name, own in areas.items()
        },
        f"difference_{first}_minus_{other}": dict(zip(("mean", "low", "high"), map(_rounded, area), strict=True)),
        "overlap": area[1] <= 0 <= area[2],
    }


def _rounded(value: float) -> float:
    return round(value, 2)


def draw(task: str, curves: Mapping[str, Mapping[int, Curve]], path: Path) -> None:
    """Draw each way's mean over seeds, its interval, and the seeds themselves."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, own in curves.items():
        steps = sorted(next(iter(own.values())))
        points = [interval_of([curve[step] for curve in own.values()]) for step in steps]
        millions = [step / 1e6 for step in steps]
        (line,) = axes.plot(millions, [mean for mean, _ in points], label=f"{name}, {len(own)} seeds")
        low, high = [mean - half for mean, half in points], [mean + half for mean, half in points]
        axes.fill_between(millions, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        for curve in own.values():
            axes.plot(millions, [curve[step] for step in steps], color=line.get_color(), alpha=0.3, linewidth=0.6)
    axes.set(title=f"{task}: mean and 95 % interval over seeds", xlabel="million env steps", ylabel="evaluated return")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# --- speed -----------------------------------------------------------------------------------------------------------


class Side:
    """A process that trains whenever it is asked, on a core that it shares with the others."""

    def __init__(self, name: str, core: int, task: str) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, core, task), daemon=True)
        self._process.start()

    def run(self, num_iterations: int) -> float:
        """Return the env steps per second of some iterations."""
        self._connection.send(num_iterations)
        rate: float = self._connection.recv()
        return rate

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.join()


def serve(connection: Connection, name: str, core: int, task: str) -> None:
    """Train whenever asked, until the other end is closed."""
    os.sched_setaffinity(0, [core])
    import torch

    from lockstep.session.process import keep_large_buffers

    torch.set_num_threads(1)
    keep_large_buffers()
    learn, env_steps = runner_of_rsl_rl(task) if name == "rsl_rl_runner" else learner_of(name, task)
    while True:
        try:
            num_iterations = connection.recv()
        except EOFError:
            return
        began = time.perf_counter()
        learn(num_iterations)
        connection.send(env_steps * num_iterations / (time.perf_counter() - began))


def learner_of(library: str, task: str) -> tuple[Callable[[int], None], int]:
    """Return what runs iterations as ``lockstep train`` does, and the env steps of one."""
    from lockstep.distributed.torch_comm import SoloComm
    from lockstep.session.make_config import make_config
    from lockstep.session.make_env import build_share
    from lockstep.session.runner import make_runner

    config = make_config(task, rl_library=library, device="cpu", env={"num_physics_threads": 1})
    shares = config.envs_by_rank(1)
    training: Any = make_runner(config, build_share(config, shares, 0), SoloComm())

    def learn(num_iterations: int) -> None:
        for _ in range(num_iterations):
            training.iterate()

    return learn, shares[0] * config.agent.num_steps_per_env


def runner_of_rsl_rl(task: str) -> tuple[Callable[[int], None], int]:
    """Return what runs iterations of RSL-RL's own runner on lockstep's envs, and the env steps of one."""
    from rsl_rl.runners import OnPolicyRunner

    from lockstep.adapters.rsl_rl.env import RslRlEnv
    from lockstep.adapters.rsl_rl.settings import settings_of
    from lockstep.session.make_config import make_config
    from lockstep.session.make_env import build_share

    config = make_config(task, rl_library="rsl_rl", device="cpu", env={"num_physics_threads": 1})
    shares = config.envs_by_rank(1)
    settings = settings_of(config) | {"num_steps_per_env": config.agent.num_steps_per_env, "save_interval": 10**9}
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(RslRlEnv(build_share(config, shares, 0)), settings)

    def learn(num_iterations: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it reports every iteration
            runner.learn(num_iterations)

    return learn, shares[0] * config.agent.num_steps_per_env


def measure(task: str, starts: int, rounds: int, iterations: int, warm_up: int) -> list[dict[str, float]]:
    """Return the rates (env steps/s) of all sides, round by round; who begins alternates."""
    core, found = min(os.sched_getaffinity(0)), list[dict[str, float]]()
    for start in range(starts):
        with ExitStack() as stack:
            sides = [stack.enter_context(closing(Side(name, core, task))) for name in SIDES]
            for side in sides:
                side.run(warm_up)
            for number in range(rounds):
                order = sides if number % 2 == 0 else sides[::-1]
                found.append({side.name: side.run(iterations) for side in order})
                shown = ", ".join(f"{name} {found[-1][name]:,.0f}/s" for name in SIDES)
                print(f"{task}, start {start + 1}/{starts}, round {number + 1}/{rounds}: {shown}", flush=True)
    return found


def compare_speed(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return medians, lowest and highest of the rates, and of lockstep's over each other, round by round."""
    rates = {name: _spread([each[name] for each in rounds], 0) for name in SIDES}
    others = [name for name in SIDES if name != "lockstep"]
    ratios = {f"lockstep / {name}": _spread([each["lockstep"] / each[name] for each in rounds], 3) for name in others}
    ratios["rsl_rl / rsl_rl_runner"] = _spread([each["rsl_rl"] / each["rsl_rl_runner"] for each in rounds], 3)
    return {"env_steps_per_s": rates, "ratios": ratios}


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


# --- the command -----------------------------------------------------------------------------------------------------


def facts(load: float) -> dict[str, Any]:
    """Return what the numbers depend on."""
    from importlib.metadata import version

    about = describe()
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/rsl_rl_beside_ours.py", *sys.argv[1:]]),
        "versions": about["versions"] | {"rsl-rl-lib": version("rsl-rl-lib")},
        "commit": about["git"]["lockstep"],
        "cpu": f"{about['hardware']['cpu']}, {about['hardware']['num_allowed_cores']} cores",
        "load_of_the_host": {"before": round(load, 1), "after": round(os.getloadavg()[0], 1)},
    }


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "speed"))
    parser.add_argument("--tasks", default="cartpole_balance,cartpole_swingup", help="comma-separated")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="of the curves, comma-separated, at least two")
    parser.add_argument("--log_root", type=Path, help="where runs are, and are kept (default: a temporary folder)")
    parser.add_argument("--starts", type=int, default=3, help="of all processes whose speed is measured")
    parser.add_argument("--rounds", type=int, default=5, help="per start")
    parser.add_argument("--iterations", type=int, default=5, help="per round")
    parser.add_argument("--warm_up", type=int, default=3, help="iterations before the first round")
    parser.add_argument("--save", action="store_true", help="store into benchmarks/guests")
    return parser.parse_known_args()


def main() -> int:
    arguments, extra = parse()
    folder = Path(tempfile.mkdtemp(prefix="rsl_rl_beside_ours_"))
    target = HERE / "guests" if arguments.save else folder
    target.mkdir(exist_ok=True)
    load, all_overlap = os.getloadavg()[0], True
    for task in arguments.tasks.split(","):
        path = target / f"rsl_rl_{arguments.what}_{task}"
        if arguments.what == "curves":
            seeds = [int(seed) for seed in arguments.seeds.split(",")]
            curves = curves_of(task, seeds, arguments.log_root or folder / "logs", extra)
            found = compare_curves(curves)
            all_overlap &= found["overlap"]
            draw(task, curves, path.with_suffix(".png"))
            more: dict[str, Any] = {"curves": curves, "differences": DIFFERENCES}
        else:
            rounds = measure(task, arguments.starts, arguments.rounds, arguments.iterations, arguments.warm_up)
            found, more = compare_speed(rounds), {"rounds": rounds}
        print(json.dumps(found, indent=2))
        content = facts(load) | {"task": task} | found | more
        path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        print(path.with_suffix(".json"))
    return 0 if all_overlap else 1


if __name__ == "__main__":
    sys.exit(main())

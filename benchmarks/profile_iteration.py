"""Where the milliseconds of one training iteration go, on one core.

    .venv/bin/python benchmarks/profile_iteration.py [--num_envs 4096] [--chunk_size 32768]

Phases are timed with plain clocks around the learner's own calls, each without what is called inside it, in CPU time
(on a busy host wall time measures the neighbours). torch.profiler is not used: the memory it takes makes the C library
fault in every large buffer anew, which doubles exactly the phases that matter.

Beside the phases with matrix products stands what the products alone would take at this core's measured rate.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.core.rng import Stream
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch import ppo, training
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_env
from lockstep.session.process import keep_large_buffers


class Phases:
    """CPU seconds per phase; the clock of a phase stands still while one inside it runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = ["rest"]
        self._since = time.process_time()

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call and start anew."""
        self._charge()
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Let every call of ``owner.function`` count as a phase."""
        original: Callable[..., Any] = getattr(owner, function)

        @wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                return original(*arguments, **options)

        setattr(owner, function, timed)

    def watch_generator(self, owner: Any, function: str, name: str) -> None:
        """Let what a generator does between two of its items count as a phase."""
        original: Callable[..., Iterator[Any]] = getattr(owner, function)

        @wraps(original)
        def timed(*arguments: Any, **options: Any) -> Iterator[Any]:
            items = original(*arguments, **options)
            while True:
                with self.phase(name):
                    item = next(items, None)
                if item is None:
                    return
                yield item

        setattr(owner, function, timed)


def watch_all(phases: Phases, run: training.Training) -> None:
    """Put a clock on every phase of an iteration, in the order in which they come."""
    learner = run.learner
    phases.watch(Stream, "bits", "random bits (all streams)")
    phases.watch(run.noise, "draw", "action noise from bits")
    phases.watch(run.policy, "act", "rollout: actor")
    phases.watch(run.env, "step", "rollout: env step")
    phases.watch(training, "collect", "rollout: sampling and stores")
    phases.watch(ppo, "rollout_values", "prepare: critic")
    phases.watch(ppo, "generalised_advantages", "prepare: advantages")
    phases.watch(learner, "prepare", "prepare: normalising and moments")
    phases.watch_generator(learner.dealer, "deal", "update: dealing minibatches")
    phases.watch_generator(learner.dealer, "chunks", "update: chunks")
    phases.watch(run.policy, "evaluate", "update: networks forward")
    phases.watch(learner, "accumulate", "update: losses and KL forward")
    phases.watch(torch.Tensor, "backward", "update: backward")
    phases.watch(learner.gradients, "zero_", "update: gradient buffer")
    phases.watch(learner.gradients, "ride_", "update: gradient buffer")
    phases.watch(learner.comm, "mean_gradients_", "update: reduction")
    phases.watch(learner.gradients, "clip_", "update: clipping")
    phases.watch(ppo, "adapt_learning_rate_", "update: learning rate")
    phases.watch(learner.optimizer, "step", "update: optimizer step")
    phases.watch(learner, "update", "update: the rest")


def matrix_flops(run: training.Training) -> dict[str, float]:
    """Return the floating point operations of the matrix products of an iteration, by phase."""
    agent, num_envs = run.config.agent, run.env.num_envs
    samples = agent.num_steps_per_env * num_envs
    forward = {name: _flops_per_sample(getattr(run.policy, name)) for name in ("actor", "critic")}
    first = {name: _linear_layers(getattr(run.policy, name))[0] for name in forward}
    trained = samples * agent.num_learning_epochs
    # Going back, every layer takes a product for its weights and one for its inputs, which the first has no use for.
    backward = sum(2 * forward[name] - 2 * first[name].weight.numel() for name in forward)
    return {
        "rollout: actor": samples * forward["actor"],
        "prepare: critic": (samples + num_envs) * forward["critic"],
        "update: networks forward": trained * sum(forward.values()),
        "update: backward": trained * backward,
    }


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def _flops_per_sample(module: nn.Module) -> float:
    return sum(2 * layer.weight.numel() for layer in _linear_layers(module))


def matrix_rate(run: training.Training, num_rows: int) -> float:
    """Return this core's flops per second in the product of the policy's widest layer."""
    layers = _linear_layers(run.policy)
    weight = max((layer.weight.detach() for layer in layers), key=torch.numel)
    inputs = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype)
    outputs = torch.empty(num_rows, weight.shape[0], dtype=weight.dtype)
    seconds = []
    for _ in range(50):
        began = time.process_time()
        torch.mm(inputs, weight.T, out=outputs)
        seconds.append(time.process_time() - began)
    return 2 * num_rows * weight.numel() / statistics.median(seconds)


def show(per_iteration: list[dict[str, float]], floors: dict[str, float]) -> None:
    """Print the table: medians over iterations, so shares need not add up to exactly 100 %."""
    names = sorted({name for each in per_iteration for name in each}, key=str.casefold)
    medians = {name: 1e3 * statistics.median(each.get(name, 0.0) for each in per_iteration) for name in names}
    total = 1e3 * statistics.median(sum(each.values()) for each in per_iteration)
    print(f"{'phase':36}{'ms':>9}{'share':>9}{'products alone, ms':>21}")
    for name in sorted(names, key=lambda name: -medians[name]):
        floor = f"{floors[name]:.1f}" if name in floors else ""
        print(f"{name:36}{medians[name]:9.1f}{medians[name] / total:9.1%}{floor:>21}")
    print(f"{'iteration':36}{total:9.1f}{1:9.1%}{sum(floors.values()):21.1f}")


def parse() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cartpole_classic")
    parser.add_argument("--num_envs", type=int, default=4096)
    parser.add_argument("--num_steps_per_env", type=int, default=24)
    parser.add_argument("--chunk_size", type=int, default=None, help="instead of the learner's default")
    parser.add_argument("--iterations", type=int, default=15)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    keep_large_buffers()
    agent: dict[str, Any] = {"num_steps_per_env": arguments.num_steps_per_env}
    agent |= {} if arguments.chunk_size is None else {"chunk_size": arguments.chunk_size}
    settings = {"num_envs": arguments.num_envs, "device": "cpu", "agent": agent}
    config: TrainConfig = merge(load(TASKS.get(arguments.task).recipe)(), settings)
    run = training.Training(config, build_env(config), SoloComm())
    for _ in range(3):
        run.iterate()
    chunk = min(
        config.agent.chunk_size, arguments.num_envs * arguments.num_steps_per_env // config.agent.num_mini_batches
    )
    rate = matrix_rate(run, chunk)
    floors = {name: 1e3 * flops / rate for name, flops in matrix_flops(run).items()}
    phases = Phases()
    watch_all(phases, run)
    per_iteration = []
    for _ in range(arguments.iterations):
        phases.take()
        run.iterate()
        per_iteration.append(phases.take())
    print(
        f"{arguments.task}, {arguments.num_envs} envs x {arguments.num_steps_per_env} steps, {chunk} samples per pass, "
        f"core {core}, torch {torch.__version__}; products at {rate / 1e9:.0f} GFLOP/s, median CPU time of "
        f"{arguments.iterations} iterations\n"
    )
    show(per_iteration, floors)


if __name__ == "__main__":
    main()

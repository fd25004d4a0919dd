"""Where the milliseconds of one training iteration go, on one core.

    .venv/bin/python benchmarks/profile_iteration.py [--num_envs 4096] [--chunk_size 32768]

Phases are timed with plain clocks around the learner's own calls, each without what is called inside it, in CPU time
(on a busy host wall time measures the neighbours). torch.profiler is not used: the memory it takes makes the C library
fault in every large buffer anew, which doubles exactly the phases that matter.

Beside the phases with matrix products stands what the products alone take, each shape as measured on this core by the
same functions; what is left of a phase is activations, sums and overhead.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.core.rng import Stream
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.torch import passes, ppo, training
from lockstep.learn.torch.perceptron import affine, transposed_product
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_env
from lockstep.session.process import keep_large_buffers

PHYSICS = "rollout: physics"


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

    def watch(self, owner: Any, function: str, name: str, within: str = "") -> None:
        """Let every call of ``owner.function`` count as a phase; if ``within`` is given, only those inside that one."""
        original: Callable[..., Any] = getattr(owner, function)

        @wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            if within and within not in self._running:
                return original(*arguments, **options)
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
    phases.watch(run.env.engine, "step", PHYSICS)
    phases.watch(training, "collect", "rollout: sampling and stores")
    phases.watch(ppo, "rollout_values", "prepare: critic")
    phases.watch(ppo, "generalised_advantages", "prepare: advantages")
    phases.watch(learner, "prepare", "prepare: normalising and moments")
    phases.watch_generator(learner.dealer, "deal", "update: dealing minibatches")
    phases.watch_generator(learner.dealer, "chunks", "update: chunks")
    for backbone in (run.policy.actor, run.policy.critic):
        phases.watch(backbone.perceptron, "trace", "update: networks forward", within="update: accumulating")
        phases.watch(backbone.perceptron, "backward_", "update: networks backward")
    for function in ("policy_gradient", "value_gradient"):
        phases.watch(passes, function, "update: losses and their gradients")
    phases.watch(run.policy, "evaluate", "update: networks forward")  # where autograd is at work
    phases.watch(torch.Tensor, "backward", "update: networks backward")
    phases.watch(learner, "accumulate", "update: accumulating")
    phases.watch(learner.gradients, "zero_", "update: gradient buffer")
    phases.watch(learner.gradients, "ride_", "update: gradient buffer")
    phases.watch(learner.comm, "mean_gradients_", "update: reduction")
    phases.watch(learner.gradients, "clip_", "update: clipping")
    phases.watch(ppo, "adapt_learning_rate_", "update: learning rate")
    phases.watch(learner.optimizer, "step", "update: optimizer step")
    phases.watch(learner, "update", "update: the rest")


def floors_ms(run: training.Training) -> dict[str, float]:
    """Return what the matrix products of each phase would take alone, each at the rate of its own shape here."""
    agent, num_envs = run.config.agent_as(PpoConfig), run.env.num_envs
    samples = agent.num_steps_per_env * num_envs
    in_pass = min(agent.chunk_size, samples // agent.num_mini_batches)
    actor, critic = (_products_ms(each, in_pass) for each in (run.policy.actor, run.policy.critic))
    at_once, _ = _products_ms(run.policy.actor, num_envs)
    num_passes = samples * agent.num_learning_epochs / in_pass
    return {
        "rollout: actor": agent.num_steps_per_env * at_once,
        "prepare: critic": (samples + num_envs) / in_pass * critic[0],
        "update: networks forward": num_passes * (actor[0] + critic[0]),
        "update: networks backward": num_passes * (actor[1] + critic[1]),
    }


def _products_ms(network: nn.Module, num_rows: int) -> tuple[float, float]:
    """Return the milliseconds of the products of one pass forward and of one backward over so many samples."""
    forward = backward = 0.0
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    for index, layer in enumerate(layers):
        weight = layer.weight.detach()
        inputs = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype)
        gradient = torch.randn(num_rows, weight.shape[0], dtype=weight.dtype)
        forward += _median_ms(partial(affine, inputs, weight, layer.bias.detach()))
        backward += _median_ms(partial(transposed_product, gradient, inputs))
        if index:  # the first layer's inputs need no gradient
            backward += _median_ms(partial(affine, gradient, weight.t(), None))
    return forward, backward


def _median_ms(product: Callable[[], torch.Tensor]) -> float:
    seconds = []
    for _ in range(30):
        began = time.process_time()
        product()
        seconds.append(time.process_time() - began)
    return 1e3 * statistics.median(seconds)


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
    named = sum(medians[name] for name in names if name in floors or name == PHYSICS)
    print(f"\noutside physics and networks: {1 - named / total:.1%}")
    print(f"the iteration takes {total / medians[PHYSICS]:.2f} times as long as its physics alone")


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
    floors = floors_ms(run)
    phases = Phases()
    watch_all(phases, run)
    per_iteration = []
    for _ in range(arguments.iterations):
        phases.take()
        run.iterate()
        per_iteration.append(phases.take())
    print(
        f"{arguments.task}, {arguments.num_envs} envs x {arguments.num_steps_per_env} steps, core {core}, torch "
        f"{torch.__version__}; median CPU time of {arguments.iterations} iterations\n"
    )
    show(per_iteration, floors)


if __name__ == "__main__":
    main()

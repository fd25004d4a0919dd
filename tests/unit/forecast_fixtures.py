"""Bundles of trainings in worlds whose prices are known, so that a fit can be held against them."""

from dataclasses import dataclass
from typing import Any

from lockstep.benchmark.schema import Bundle
from lockstep.benchmark.spread import spread_of
from tests.unit.bundle_fixtures import make_bundle

NUM_STEPS, NUM_EPOCHS, NUM_MINI_BATCHES = 10, 2, 5


@dataclass(frozen=True)
class World:
    """What things take here, in seconds.

    Attributes:
        step_s: of an env step.
        call_s: of what is done once for each step of all envs.
        minibatch_s: of what is done once for each minibatch.
        product_s: of a floating-point operation of the networks, in the update.
        slowdown: share by which a rank is slower when all other cores of the node are busy.
        turns_overhead: share by which turns take longer than their share of a core.
        turns_exchange_s: that turns take longer for each exchange and other rank.
        latency_s: of a step of an exchange.
        byte_s: of a byte of an exchange.
        straggler_s: mean wait for stragglers, of an iteration of several ranks.
        num_cores: of a node.
    """

    step_s: float = 1e-6
    call_s: float = 5e-4
    minibatch_s: float = 1e-3
    product_s: float = 1e-11
    slowdown: float = 0.0
    turns_overhead: float = 0.0
    turns_exchange_s: float = 0.0
    latency_s: float = 1e-5
    byte_s: float = 1e-9
    straggler_s: float = 0.0
    num_cores: int = 4


def train(
    world: World,
    num_ranks: int = 1,
    num_envs: int = 1000,
    flops: float = 10_000.0,
    num_cores: int | None = None,
    device: str = "cpu",
    num_nodes: int = 1,
    slow: dict[int, float] | None = None,
    factor: float = 1.0,
) -> Bundle:
    """Return the bundle of a training in a world.

    Args:
        world: where it runs.
        num_ranks: of one thread each.
        num_envs: of each rank.
        flops: of the networks for a sample; they have half as many parameters.
        num_cores: that the job may use of its node; None: all.
        device: cpu, or cuda for a GPU for each rank.
        num_nodes: that the ranks are dealt to.
        slow: ranks that compute longer by a factor.
        factor: by which everything that ranks compute takes longer than it should.
    """
    allowed, here = num_cores or world.num_cores, num_ranks // num_nodes
    on_gpu = device == "cuda"
    busy_others = 0.0 if on_gpu else (min(here, allowed) - 1) / max(1, world.num_cores - 1)
    turns = 1.0 if on_gpu else max(1.0, here / allowed)
    rollout_s, update_s = _alone_s(world, num_envs, flops, factor * (1 + world.slowdown * busy_others))
    own_s = [(rollout_s + update_s) * (slow or {}).get(rank, 1.0) for rank in range(num_ranks)]
    num_exchanges = NUM_EPOCHS * NUM_MINI_BATCHES + 1
    compute_s = own_s
    if turns > 1:
        lost_s = world.turns_exchange_s * num_exchanges * (here - 1)
        compute_s = [turns * (each * (1 + world.turns_overhead) + lost_s) for each in own_s]
    content = make_bundle("training", [num_envs] * num_ranks, None, num_nodes, device).model_dump()
    content |= {"compute_spread": spread_of(compute_s).model_dump(), "slowest_rank": compute_s.index(max(compute_s))}
    content["work"] = _work(flops)
    for node in content["hardware"]:
        node |= {"num_cores": world.num_cores, "num_allowed_cores": allowed}
    for rank, own, computed in zip(content["ranks"], own_s, compute_s, strict=True):
        rank |= {"threads": 1, "compute_s": _use(computed), "contention_s": _use(computed - own), "cpu_s": _use(own)}
        rank |= {"rollout_s": _use(rollout_s), "update_s": _use(update_s), "others_cpu_percent": _use(0.0)}
    content["runtime"] |= _runtime(world, flops, own_s, compute_s)
    return Bundle.model_validate(content)


def _alone_s(world: World, num_envs: int, flops: float, stretched: float) -> tuple[float, float]:
    """Return what rollout and update take, all of it longer by a factor."""
    samples = num_envs * NUM_STEPS
    minibatches_s = NUM_EPOCHS * NUM_MINI_BATCHES * world.minibatch_s
    products_s = 3 * NUM_EPOCHS * samples * flops * world.product_s  # forward, and twice that backward
    return stretched * (samples * world.step_s + NUM_STEPS * world.call_s), stretched * (minibatches_s + products_s)


def _work(flops: float) -> dict[str, Any]:
    return {
        "num_steps_per_env": NUM_STEPS,
        "num_learning_epochs": NUM_EPOCHS,
        "num_mini_batches": NUM_MINI_BATCHES,
        "num_parameters": int(flops / 2),
        "flops_per_action": flops / 2,
        "flops_per_sample": flops,
    }


def _runtime(world: World, flops: float, own_s: list[float], compute_s: list[float]) -> dict[str, Any]:
    num_ranks = len(own_s)
    sizes = {"gradients": (NUM_EPOCHS * NUM_MINI_BATCHES, 2.0 * flops), "metrics": (1, 100.0)}
    exchanges = [] if num_ranks == 1 else [_exchange(world, num_ranks, tag, *size) for tag, size in sizes.items()]
    communication_s = sum(each["num"] * each["communication_s"] for each in exchanges)
    own_mean_s, mean_s = sum(own_s) / num_ranks, sum(compute_s) / num_ranks
    chance_s = world.straggler_s if num_ranks > 1 else 0.0
    return {
        "iteration_s": spread_of([max(compute_s) + chance_s + communication_s] * 3).model_dump(),
        "exchanges": exchanges,
        "split": {
            "compute_s": own_mean_s,
            "contention_s": mean_s - own_mean_s,
            "straggler_wait_s": max(0.0, max(compute_s) - mean_s) + chance_s,
            "communication_s": communication_s,
        },
    }


def _exchange(world: World, num_ranks: int, tag: str, num: int, num_bytes: float) -> dict[str, Any]:
    steps = 2 * (num_ranks - 1)
    return {
        "tag": tag,
        "num": float(num),
        "num_bytes": num_bytes,
        "communication_s": steps * (world.latency_s + num_bytes / num_ranks * world.byte_s),
        "straggler_wait_s": 0.0,
    }


def _use(seconds: float) -> dict[str, float]:
    return {"mean": seconds, "peak": seconds}


def grid(world: World, **settings: Any) -> list[tuple[str, Bundle]]:
    """Return bundles of 1 and 2 ranks, few and many envs, small and large networks, each with a name."""
    return [
        (f"{num_ranks}_{num_envs}_{flops:.0f}.json", train(world, num_ranks, num_envs, flops, **settings))
        for num_ranks in (1, 2)
        for num_envs in (500, 2000)
        for flops in (10_000.0, 80_000.0)
    ]

"""A bundle in a few lines, for the terminal."""

from collections.abc import Iterator

from lockstep.benchmark.schema import Bundle, Runtime, Startup
from lockstep.benchmark.units import duration, quantity
from lockstep.recipes.libraries import OWN

_NUM_FUNCTIONS = 5
_FAR = 1.25
"""Times the median iteration: a mean beyond it is that of few iterations that took long."""


def lines_of(bundle: Bundle) -> Iterator[str]:
    """Yield what a bundle says most of all."""
    run = bundle.run
    count = len(bundle.ranks)
    nodes = f" on {bundle.num_nodes} nodes" if bundle.num_nodes > 1 else ""
    ranks = f"{count} rank{'s' if count > 1 else ''}{nodes}"
    library = "" if run.rl_library == OWN else f"{run.rl_library} with "
    yield f"{bundle.kind}: {run.task}, {library}{run.ml_framework}, {ranks}, {_envs(bundle)}, on {run.device}"
    if bundle.runtime is not None:
        yield from _runtime(bundle.runtime)
    if bundle.startup is not None:
        yield from _startup(bundle.startup)
    if bundle.slowest_rank is not None and count > 1 and bundle.runtime is not None:
        yield _ranks(bundle, bundle.slowest_rank)
    for finding in bundle.findings:
        yield finding.words
    success = None if bundle.learning is None else bundle.learning.success
    if success is not None:
        verdict = "learned" if success.reached else "not learned"
        needed = f"{success.needed_return:.4g} is needed"
        yield f"{verdict}: mean return {success.mean_return:.4g} in the evaluation; {needed}"
    for kind, path in bundle.artifacts.model_dump().items():
        if path is not None:
            yield f"{kind.replace('_', ' ')}: {path}"


def _envs(bundle: Bundle) -> str:
    shares = bundle.num_envs_per_rank
    if isinstance(shares, int):
        return f"{shares} envs per rank" if len(bundle.ranks) > 1 else f"{shares} envs"
    return f"{bundle.total_envs} envs ({','.join(map(str, shares))})"


def _runtime(runtime: Runtime) -> Iterator[str]:
    one = runtime.iteration_s
    yield (
        f"  {runtime.steps_per_s:,.0f} env steps/s: {quantity(runtime.env_steps, '')} env steps in "
        f"{duration(runtime.wall_s)} ({runtime.iterations} iterations, after {runtime.warm_up.iterations} to warm up "
        f"in {duration(runtime.warm_up.wall_s)})"
    )
    yield (
        f"  iteration {duration(one.mean)} on average; median {duration(one.median)}, p10 {duration(one.p10)}, "
        f"p90 {duration(one.p90)}"
    )
    if one.mean > _FAR * one.median and runtime.each_iteration_s:
        longest = runtime.each_iteration_s.index(max(runtime.each_iteration_s)) + 1
        yield f"  the mean is far above the median: iteration {longest} took {duration(one.most)}"
    if runtime.split is not None:
        total = sum(runtime.split.model_dump().values()) or 1.0
        parts = {
            "compute": runtime.split.compute_s,
            "without a core": runtime.split.contention_s,
            "waiting for stragglers": runtime.split.straggler_wait_s,
            "communication": runtime.split.communication_s,
        }
        yield "  " + ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts.items())


def _startup(startup: Startup) -> Iterator[str]:
    for phase in startup.phases:
        cold = "" if phase.cold_s is None else f"  cold {duration(phase.cold_s.median):>8}"
        warm = "" if phase.warm_s is None else f"  warm {duration(phase.warm_s.median):>8}"
        yield f"  {phase.name:<16}{cold}{warm}"
    top = sorted(startup.functions, key=lambda each: each.own_s, reverse=True)[:_NUM_FUNCTIONS]
    if top:
        yield "  medians over ranks; by a profiler, which slows it down, most of its own time was in"
    for function in top:
        yield f"    {duration(function.own_s):>8} {function.function} ({function.phase})"


def _ranks(bundle: Bundle, slowest_rank: int) -> str:
    slowest = bundle.ranks[slowest_rank]
    spread = bundle.compute_spread
    between = (
        ""
        if spread is None
        else f"; ranks compute {duration(spread.least)} to {duration(spread.most)} on average, without a core included"
    )
    return f"  slowest: rank {slowest.rank} on {slowest.host} ({slowest.device}){between}"

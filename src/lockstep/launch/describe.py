"""A plan in words: what the dry run prints."""

import shlex
from collections.abc import Mapping

from lockstep.launch.devices import MIN_FREE_SHARE, GpuUse, RankPlace
from lockstep.launch.plan import COORDINATOR, Plan

_GIB = 2**30


def describe(plan: Plan, uses: Mapping[str, GpuUse]) -> list[str]:
    """Return the lines of a plan.

    Args:
        plan: of a launch.
        uses: of the GPUs that are known, by UUID.
    """
    several = plan.rendezvous.num_nodes > 1
    everywhere = " if every node has as many" if several else ""
    fewest = plan.rendezvous.min_nodes
    at_least = "" if fewest is None else f"{plan.num_ranks * fewest} to "
    lines = [
        _row("ranks", f"{plan.num_ranks} on this node, {at_least}{plan.world_size} in all{everywhere}"),
        *(_row(f"  {_rank(plan, place)}", _place(plan, place, uses)) for place in plan.places),
    ]
    if plan.work.envs_by_rank is not None:
        lines.append(_row("envs", _envs(plan, sum(plan.work.envs_by_rank))))
    nodes = f"{plan.rendezvous.count}, " if several else ""
    lines += [
        _row("rendezvous", nodes + plan.rendezvous.description),
        *([_row("coordinator", _coordinator(plan))] if plan.coordinator or plan.work.has_coordinator else []),
        _row("backend", plan.backend),
        _row("logs", _logs(plan)),
        _row("restarts", f"at most {plan.max_restarts}" if plan.max_restarts else "none"),
    ]
    if plan.removed:
        lines.append(_row("removed", " ".join(plan.removed)))
    environment = [f"{name}={shlex.quote(value)}" for name, value in plan.added.items()]
    by_hand = plan.plain_torchrun()
    if plan.coordinator is not None:
        by_hand = f"{COORDINATOR}={plan.coordinator} {by_hand}"
    lines += [
        _row("command", " ".join([*environment, shlex.join(plan.command)])),
        _row("by hand", by_hand),
    ]
    return lines


def concerns(plan: Plan, uses: Mapping[str, GpuUse]) -> list[str]:
    """Return what might go wrong, a line each."""
    found = list(plan.warnings)
    for place in plan.places:
        use = uses.get(place.gpu.uuid) if place.gpu else None
        if use is None:
            continue
        users = ", ".join(
            f"{user.name} (pid {user.pid}"
            + ("" if user.memory_bytes is None else f", {user.memory_bytes / 2**20:.0f} MiB")
            + ")"
            for user in use.users
        )
        if users:
            found.append(f"GPU {place.entry} is used by {users}")
        if use.free_bytes < MIN_FREE_SHARE * use.total_bytes:
            found.append(
                f"GPU {place.entry} has only {use.free_bytes / _GIB:.1f} of {use.total_bytes / _GIB:.1f} GiB free"
            )
    return found


def _envs(plan: Plan, most: int) -> str:
    if plan.work.fewest_envs in (None, most):
        return f"{most} in all"
    return f"{plan.work.fewest_envs} to {most} in all, by how many nodes there are at the start"


def _row(label: str, text: str) -> str:
    return f"{label:<12}{text}"


def _rank(plan: Plan, place: RankPlace) -> str:
    first = plan.first_rank()
    return f"local {place.local_rank}" if first is None else f"rank {first + place.local_rank}"


def _place(plan: Plan, place: RankPlace, uses: Mapping[str, GpuUse]) -> str:
    parts = ["CPU" if place.entry is None else f"GPU {place.entry}"]
    if place.gpu is not None:
        parts += [place.gpu.name, place.gpu.uuid]
        use = uses.get(place.gpu.uuid)
        if use is not None:
            parts.append(f"{use.free_bytes / _GIB:.1f} of {use.total_bytes / _GIB:.1f} GiB free")
    elif place.entry is not None:
        parts.append("which one is known with CUDA_DEVICE_ORDER=PCI_BUS_ID only")
    first, envs = plan.first_rank(), plan.work.envs_by_rank
    if envs is not None and first is not None:
        parts.append(f"{envs[first + place.local_rank]} envs")
    elif envs is not None and len(set(envs)) == 1 and not plan.rendezvous.is_elastic:
        parts.append(f"{envs[0]} envs")
    return ", ".join(parts)


def _coordinator(plan: Plan) -> str:
    if plan.coordinator is not None:
        return f"of JAX at {plan.coordinator}, kept by process 0"
    return "of JAX on a free port that process 0 finds and tells the others"


def _logs(plan: Plan) -> str:
    hidden = [rank for rank in range(plan.num_ranks) if plan.streams_on_screen(rank) != 3]
    if any(plan.teed):
        teed = [str(rank) for rank, streams in enumerate(plan.teed) if streams]
        text = (
            f"local rank{'s' if len(teed) > 1 else ''} {', '.join(teed)} on the screen, with the rank before each line"
        )
        if not plan.teed[0]:
            text = f"local rank 0 on the screen, and {text}"
    else:
        text = "local rank 0 on the screen"
    if hidden or any(plan.teed):
        text += f"; files in {plan.log_dir}" if plan.keeps_logs else "; files in a temporary folder until a clean end"
    return text

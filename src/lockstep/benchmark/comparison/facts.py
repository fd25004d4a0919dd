"""What was different between benchmarks, apart from how fast they were: versions, hardware, settings."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lockstep.benchmark.amounts import num_bytes
from lockstep.benchmark.schema import Bundle, NodeHardware, Record

Area = Literal["measurement", "versions", "hardware", "settings"]

_SAYS_NOTHING = {
    *("log_root", "run_name", "logger", "world_size", "num_envs", "total_envs"),
    *("max_iterations", "evaluation.interval", "checkpoints.interval", "checkpoints.interval_s"),
}
"""Settings that change no speed or follow from how it was measured, or of which the bundle has a field of its own."""

_ABSENT = "absent"


class Difference(Record):
    """One fact that is not the same in all bundles; ``values`` are in their order, as text."""

    area: Area
    name: str
    values: tuple[str, ...]


def differences_of(bundles: Sequence[Bundle]) -> tuple[Difference, ...]:
    """Return every fact in which bundles differ, in the order of ``Area``."""
    tables = [dict(_facts(bundle)) for bundle in bundles]
    # Each fact once, in the order in which they first come.
    names = dict.fromkeys(name for table in tables for name in table)
    found = []
    for area, name in names:
        values = tuple(table.get((area, name), _ABSENT) for table in tables)
        if len(set(values)) > 1:
            found.append(Difference(area=area, name=name, values=values))
    order = ("measurement", "versions", "hardware", "settings")
    return tuple(sorted(found, key=lambda each: order.index(each.area)))


def _facts(bundle: Bundle) -> Iterator[tuple[tuple[Area, str], str]]:
    run, versions = bundle.run, bundle.versions
    if bundle.runtime is not None:
        yield ("measurement", "iterations measured"), str(bundle.runtime.iterations)
        yield ("measurement", "iterations of warm-up"), str(bundle.runtime.warm_up.iterations)
    if bundle.startup is not None:
        yield ("measurement", "warm starts"), str(bundle.startup.repetitions)
    yield ("versions", "python"), versions.python
    for name, version in versions.packages.items():
        yield ("versions", name), version or _ABSENT
    for name in ("driver", "cuda", "nccl"):
        yield ("versions", name), getattr(versions, name) or _ABSENT
    yield ("versions", "git"), _text(run.git) if run.git else _ABSENT
    yield ("hardware", "nodes"), "; ".join(describe_nodes(bundle.hardware))
    yield ("hardware", "hosts"), ", ".join(sorted({node.host for node in bundle.hardware}))
    yield ("hardware", "platform"), ", ".join(sorted({node.platform for node in bundle.hardware}))
    yield (
        ("hardware", "cores of each rank"),
        _several([len(rank.cores) if rank.cores else None for rank in bundle.ranks]),
    )
    for name in ("ml_framework", "rl_library", "algorithm", "engine", "device", "dtype", "seed"):
        yield ("settings", name), str(getattr(run, name))
    yield ("settings", "threads of each rank"), _several([rank.threads for rank in bundle.ranks])
    settled = {"task", "ml_framework", "rl_library", "algorithm", "engine", "device", "dtype", "seed", *_SAYS_NOTHING}
    for name, value in _flat(run.config):
        if name not in settled:
            yield ("settings", name), _text(value)


def describe_nodes(nodes: Sequence[NodeHardware]) -> list[str]:
    """Return one line for each kind of node, as ``2 x AMD EPYC, 4 of 192 cores, 256 GiB, 8 x NVIDIA H200``."""
    kinds = Counter(_describe(node) for node in nodes)
    return [f"{number} x {kind}" if number > 1 else kind for kind, number in kinds.items()]


def _describe(node: NodeHardware) -> str:
    cores = f"{node.num_allowed_cores} of {node.num_cores} cores"
    if node.num_allowed_cores == node.num_cores:
        cores = f"{node.num_cores} cores"
    gpus = [f"{number} x {name}" for name, number in Counter(gpu.name for gpu in node.gpus).items()]
    return ", ".join([node.cpu or "unknown CPU", cores, num_bytes(node.memory_bytes), *gpus])


def _several(values: Sequence[int | None]) -> str:
    """Return what all ranks have, or from where to where it goes."""
    known = sorted({value for value in values if value is not None})
    if not known:
        return _ABSENT
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(inner) for inner in value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

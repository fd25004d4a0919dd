"""A forecast in words: where scaling stops and by what, what the model is made of, and what it can't know."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from lockstep.benchmark.forecast.compute import Price
from lockstep.benchmark.forecast.forecast import LEAST_EFFICIENCY, LEAST_GAIN, Forecast, Row, has_stopped
from lockstep.benchmark.forecast.model import Model
from lockstep.benchmark.forecast.points import Point, Setting
from lockstep.benchmark.units import duration, percent, quantity

GOOD_ERROR = 0.15
"""A larger error on points held back is said to be one."""

MUCH = 0.1
"""Of the cores that ranks may use, other processes should keep a smaller share busy."""

FAR = 4
"""More ranks than this many times those measured are far from what was measured."""


def words_of(result: Forecast) -> str:
    """Return where scaling stops and which part of an iteration does it: one paragraph."""
    row = result.stop or result.rows[-1]
    ranks = _ranks(row.setting.num_ranks)
    if result.stop is None:
        said = f"Scaling goes on up to {ranks}, with an efficiency of {percent(row.efficiency)} there."
    elif row.efficiency < LEAST_EFFICIENCY:
        said = f"Scaling stops at {ranks}, where the efficiency is {percent(row.efficiency)}."
    else:
        gain = f"by {percent(row.gain)} only" if row.gain is not None and row.gain > 0 else "by nothing"
        said = f"Scaling stops at {ranks}: the last doubling raises env steps per second {gain}."
    if result.cause is None:
        return f"{said} Nothing notable is lost." if len(result.rows) > 1 else said
    cost_s = asdict(row.prediction)[f"{result.cause}_s"]
    share = percent(cost_s / row.prediction.iteration_s)
    whole = duration(row.prediction.iteration_s)
    return f"{said} Most is lost to {_cause_in_words(result, row)}: {share} of an iteration of {whole}.{_best(result)}"


def _best(result: Forecast) -> str:
    before = [row for row in result.rows if not has_stopped(row)]
    if result.stop is None or not before:
        return ""
    best = max(before, key=lambda row: row.steps_per_s)
    said = f" Up to {_ranks(best.setting.num_ranks)} it pays: {best.steps_per_s:,.0f} env steps/s."
    later = result.rows[result.rows.index(result.stop) + 1 :]
    gains = [row.gain for row in later if row.gain is not None and row.gain >= LEAST_GAIN]
    if gains:
        last = later[-1]
        said += (
            f" At that efficiency more ranks still give more: {percent(min(gains))} to {percent(max(gains))} with each "
            f"doubling, {last.steps_per_s:,.0f} env steps/s by {_ranks(last.setting.num_ranks)}."
        )
    return said


def _cause_in_words(result: Forecast, row: Row) -> str:
    model, setting = result.model, row.setting
    messages = model.messages(setting)
    num, each = sum(message.num for message in messages), max((message.num_bytes for message in messages), default=0)
    network = model.network(setting)
    where = "inside a node" if setting.num_nodes == 1 else "between nodes"
    lagging = model.stragglers.lagging
    if result.cause == "latency" and network is not None:
        steps, passes = network.steps_and_passes(setting.num_ranks, each, setting.on_gpu)
        way = "around a ring" if passes < 2 else "up and down a tree"
        return (
            f"the latency of exchanges {where} ({num:.0f} per iteration, each of {steps} steps of "
            f"{duration(network.latency_s)} {way}; fewer minibatches or more envs per rank help, a larger bandwidth "
            "doesn't)"
        )
    if result.cause == "bandwidth" and network is not None and network.byte_s > 0:
        return (
            f"the bandwidth {where} ({quantity(1 / network.byte_s, 'B/s')}, messages of up to {quantity(each, 'B')}; "
            "smaller networks, fewer minibatches or more envs per rank help)"
        )
    if result.cause == "turns":
        threads = setting.ranks_per_node * setting.threads
        return f"ranks that take turns on cores ({threads} threads on {setting.allowed_cores} cores of a node)"
    if result.cause == "shared_memory":
        return "what the ranks of a node share beside cores, its memory and caches, as more of its cores are busy"
    if result.cause == "lagging" and lagging is not None:
        return (
            f"a straggler: rank {lagging.rank} on {lagging.host} computes {percent(lagging.share)} longer than the "
            "others wherever it was measured, and all wait for it"
        )
    return (
        "stragglers: ranks differ by chance, by "
        f"{percent(model.stragglers.deviation)} of what they compute, and all wait for the slowest"
    )


def model_in_words(model: Model) -> list[str]:
    """Return what the model is made of: a line for each part."""
    terms = ", ".join(_price(each) for each in model.compute.prices)
    lines = [f"computing: {terms}"]
    if model.compute.left_out:
        lines.append(f"not used: {_left_out(model.compute.left_out)}")
    if not model.points[0].setting.on_gpu:
        busy = f"all other cores of the node busy: {percent(model.compute.slowdown)} longer"
        if model.turns is not None:
            busy += (
                f"; taking turns on a core: {percent(model.turns.overhead)} and {duration(model.turns.exchange_s)} for "
                "each exchange and other rank, longer than its share of the core"
            )
        lines.append(busy)
    for name, network in (("inside a node", model.inside), ("between nodes", model.between)):
        if network is not None:
            speed = quantity(1 / network.byte_s, "B/s") if network.byte_s else "no time for their bytes"
            lines.append(f"exchanges {name}: {duration(network.latency_s)} each step, {speed}")
    lines.append(f"ranks differ by chance: standard deviation {percent(model.stragglers.deviation)} of computing")
    return lines


def _left_out(terms: Sequence[tuple[str, str]]) -> str:
    reasons = dict.fromkeys(reason for _, reason in terms)
    return "; ".join(f"{', '.join(name for name, why in terms if why == reason)}: {reason}" for reason in reasons)


def _price(price: Price) -> str:
    return f"{price.term.name} {_tiny(price.seconds)}"


def _tiny(seconds: float) -> str:
    for size, unit in ((1e-6, "us"), (1e-9, "ns"), (1e-12, "ps")):
        if seconds >= size:
            return duration(seconds) if unit == "us" else f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-12:.2g} ps"


def error_in_words(result: Forecast) -> str:
    """Return how wrong the model is about points that it has not seen."""
    worst = result.worst
    return (
        f"each of {len(result.held_back)} measured settings foretold from all others: median error "
        f"{percent(result.median_error)}, worst {percent(abs(worst.error))} ({_named(worst.point.setting)}: "
        f"{duration(worst.predicted_s)} foretold, {duration(worst.point.iteration_s)} measured)"
    )


def _named(setting: Setting) -> str:
    cores = "" if setting.on_gpu else f" on {setting.allowed_cores} cores"
    return (
        f"{_ranks(setting.num_ranks)}{cores}, {setting.num_envs} envs each, {setting.work.num_parameters:,} parameters"
    )


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def warnings_of(result: Forecast) -> list[str]:
    """Return what is to be taken with care, a sentence each."""
    points, model = result.model.points, result.model
    largest = result.rows[-1].setting
    found = []
    if abs(result.worst.error) > GOOD_ERROR:
        found.append(
            f"the model is wrong by {percent(abs(result.worst.error))} about a measured setting that it had not seen; "
            "measure again on a machine without other work, or measure more settings"
        )
    envs = [each.setting.num_envs for each in points]
    if not min(envs) <= largest.num_envs <= max(envs):
        found.append(f"{largest.num_envs} envs per rank were never measured, only {_range(envs)}")
    disturbed = [each for each in points if each.disturbed > MUCH]
    if disturbed:
        most = max(disturbed, key=lambda each: each.disturbed)
        found.append(
            f"other processes kept cores busy in {len(disturbed)} of {len(points)} measured settings, in "
            f"{most.names[0]} {percent(most.disturbed)} of them; measure again without them"
        )
    return [*found, *_about_ranks(points, largest), *_about_cores(points, result), *_about_exchanges(model, result)]


def _about_ranks(points: Sequence[Point], largest: Setting) -> list[str]:
    found = []
    ranks = [each.setting.num_ranks for each in points]
    if largest.num_ranks > FAR * max(ranks):
        found.append(f"{largest.num_ranks} ranks are far from the {max(ranks)} that were measured at most")
    here = max(each.setting.ranks_per_node for each in points)
    if largest.ranks_per_node > here:
        found.append(f"{largest.ranks_per_node} ranks on a node were never measured, {here} at most")
    return found


def _about_cores(points: Sequence[Point], result: Forecast) -> list[str]:
    model, settings = result.model, [row.setting for row in result.rows]
    if settings[0].on_gpu:
        return []
    found = []
    if any(each.load > 1 for each in settings) and model.turns is None:
        found.append(
            "more ranks than cores were never measured: they are foretold to lose nothing but turns, and lose more; "
            "a bundle of 2 ranks on one core (taskset -c 0 lockstep benchmark training_multigpu --num_gpus 2) tells"
        )
    odd = next((each for each in settings if each.load > 1 and each.load % 1), None)
    if odd is not None:
        found.append(
            f"{odd.ranks_per_node * odd.threads} threads do not divide into {odd.allowed_cores} cores evenly; their "
            "ranks wait for those on the fullest core and may take up to "
            f"{percent(math.ceil(odd.load) / odd.load - 1)} longer"
        )
    if max(each.busy_share for each in settings) > max(each.setting.busy_share for each in points):
        found.append("a node with as many busy cores was never measured")
    threads = {each.setting.threads for each in points}
    unseen = sorted({each.threads for each in settings} - threads)
    if unseen:
        found.append(
            f"ranks of {' or '.join(map(str, unseen))} threads were never measured, only of "
            f"{' and '.join(map(str, sorted(threads)))}"
        )
    return found


def _about_exchanges(model: Model, result: Forecast) -> list[str]:
    points, found = model.points, []
    largest = result.rows[-1].setting
    if largest.num_nodes > 1 and all(each.setting.num_nodes == 1 for each in points):
        found.append("the network between nodes was never measured: its bandwidth and latency are taken as given")
    if largest.num_ranks == 1:
        return found
    if all(each.setting.num_ranks == 1 for each in points):
        found.append(
            "every bundle is of one rank: exchanges inside a node can't be fitted and are taken to be as slow as the "
            "network given; messages are taken to be a gradient for each minibatch"
        )
    elif model.inside is None:
        found.append("exchanges inside a node were seen only where ranks wait for cores, if at all: they count as free")
    if largest.num_nodes > 1 and model.between is None:
        found.append("no bundle of several nodes tells what its exchanges took: they count as free")
    if not model.stragglers.is_measured:
        found.append("how ranks differ is guessed from how the iterations of a rank differ")
    return found


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"

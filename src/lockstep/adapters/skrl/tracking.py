"""What an agent of skrl notes while it learns, in a run's words; for torch and JAX alike."""

from typing import Any

_OF_CONTINUOUS_ACTIONS = ("standard_deviation",)
"""A choice has none: the library notes NaN, or what stands in that place."""


def take_numbers(agent: Any, *, is_discrete: bool) -> dict[str, float]:
    """Return by name the means of what an agent has noted since the last time, and let it forget them.

    Losses go by their own names, as ``policy`` of ``Loss / Policy loss``; the library's other numbers come after
    ``skrl/``, but for those that lockstep knows itself and those that are extremes of others. None is left out for its
    value: all ranks must have the same names.

    Args:
        agent: of the library.
        is_discrete: whether its actions are choices.
    """
    left_out = _OF_CONTINUOUS_ACTIONS if is_discrete else ()
    noted, numbers = dict(agent.tracking_data), {}
    agent.tracking_data.clear()
    for tag, values in noted.items():
        kind, _, name = tag.partition(" / ")
        mean = sum(map(float, values)) / len(values)
        slug = name.removesuffix(" (mean)").lower().replace(" ", "_").replace("-", "_")
        if kind == "Loss":
            numbers[slug.removesuffix("_loss")] = mean
        elif kind not in ("Stats", "Learning") and "(" not in slug and slug not in left_out:
            numbers[f"skrl/{slug}"] = mean
    return numbers

"""Does what a checkpoint holds fit the run that takes it up? The same words for every framework."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.core.errors import UsageError

Array = Any

HEADER_FILE = "lockstep.json"
"""What every checkpoint that is a folder (JAX) has in it: plain values, and the sums of all other files."""


class DamagedError(UsageError):
    """A checkpoint is not what was written."""


def other_framework(path: object, found: object, wanted: str) -> UsageError:
    """Return the error for a checkpoint of another framework than the one that reads it."""
    return UsageError(f"checkpoint {path} is of framework '{found}', not {wanted}; use --ml_framework {found}")


def require_header(
    content: Any, required: Mapping[str, type], format_number: int, framework: str, path: object
) -> None:
    """Raise ``UsageError`` if the plain part of a checkpoint is not what lockstep writes for this framework.

    Args:
        content: what was read.
        required: the names that there must be, and the types of their values.
        format_number: that this version reads.
        framework: that reads it.
        path: of the checkpoint.
    """
    if not isinstance(content, dict) or not content.keys() >= required.keys():
        raise UsageError(f"checkpoint {path} is not a lockstep checkpoint; it lacks what lockstep writes")
    for name, kind in required.items():
        if not isinstance(content[name], kind):
            raise UsageError(f"checkpoint {path} has {name} of type {type(content[name]).__name__}; use another one")
    if content["format"] != format_number:
        raise UsageError(f"checkpoint {path} has format {content['format']}, this version reads format {format_number}")
    if content["ml_framework"] != framework:
        raise other_framework(path, content["ml_framework"], framework)


@contextmanager
def incomplete_in_words(path: object) -> Iterator[None]:
    """Turn what the reading code stumbles over, in a checkpoint that somebody changed, into one line.

    Raises:
        UsageError: an entry was missing or of another kind.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UsageError(f"checkpoint {path} is incomplete or was changed ({reason}); use another one") from error


def require_task(saved: Mapping[str, Any], task: str, path: object) -> None:
    """Raise ``UsageError`` if a checkpoint is of another task."""
    if saved["task"] != task:
        raise UsageError(f"checkpoint {path} is of task '{saved['task']}', not '{task}'")


def require_parts(saved: Mapping[str, Any], names: Sequence[str], path: object) -> None:
    """Raise ``UsageError`` if a checkpoint lacks what a run needs to go on."""
    missing = [name for name in names if name not in saved]
    if missing:
        raise UsageError(f"checkpoint {path} has no {missing[0]}, so a run can't resume from it; use --checkpoint")


def require_settings(before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str], path: object) -> None:
    """Compare settings that a run keeps for its whole life.

    Args:
        before: the config that the checkpoint was made with, as plain values.
        now: the config that goes on.
        names: of the settings; with a dot for one of a group.
        path: of the checkpoint.

    Raises:
        UsageError: one of them has changed.
    """
    for name in names:
        *group, field = name.split(".")
        then, asked = ((config[group[0]] if group else config)[field] for config in (before, now))
        if then != asked:
            raise UsageError(
                f"checkpoint {path} has {name} {then}, not {asked}; a run resumes with the {name} it had (to "
                "change it, start a new run with --checkpoint)"
            )


def require_num_envs(num_envs: int, total_envs: int, path: object) -> None:
    """Raise ``UsageError`` if a checkpoint has another number of envs than the run."""
    if num_envs != total_envs:
        raise UsageError(
            f"checkpoint {path} has {num_envs} envs, not {total_envs}; a run resumes with as many as it "
            "had (to change them, start a new run with --checkpoint)"
        )


def require_num_models(saved: Mapping[str, Any], num_models: int, path: object) -> None:
    """Raise ``UsageError`` if a checkpoint's envs have other variants of the task's model than those of the run.

    How many there are says who has which. Before this was written down, checkpoints did not tell.
    """
    then = saved.get("num_models", num_models)
    if then != num_models:
        raise UsageError(
            f"checkpoint {path} has {then} variants of the task's model, not {num_models}; a run resumes with as many "
            "as it had (to change them, start a new run with --checkpoint)"
        )


def require_iterations(iteration: int, max_iterations: int, path: object) -> None:
    """Raise ``UsageError`` if a checkpoint is past the end of the run."""
    if iteration > max_iterations:
        raise UsageError(
            f"checkpoint {path} is of iteration {iteration}, past max_iterations "
            f"{max_iterations}, which is the total; use a larger --max_iterations"
        )


def require_like(saved: Any, expected: Any, path: object, name: str) -> None:
    """Compare names, shapes and dtypes of two nests of dicts and arrays.

    Args:
        saved: what was read.
        expected: what there must be: arrays, or anything that has a ``shape`` and a ``dtype``.
        path: of the checkpoint.
        name: of the whole nest.

    Raises:
        UsageError: naming the first entry of ``saved`` that does not fit.
    """
    if isinstance(expected, Mapping):
        for inner, value in expected.items():
            if not isinstance(saved, Mapping) or inner not in saved:
                raise UsageError(f"checkpoint {path} lacks {name}.{inner}, so a run can't resume from it")
            require_like(saved[inner], value, path, f"{name}.{inner}")
        return
    found, wanted = (_kind(value) for value in (saved, expected))
    if found != wanted:
        raise UsageError(f"checkpoint {path} has {name} as {found}, not {wanted}; use the settings it was made with")


def _kind(value: Any) -> str:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return type(value).__name__
    return f"{tuple(value.shape)} of {value.dtype}"


def require_weights(
    saved: Mapping[str, Array], expected: Mapping[str, Array], is_finite: Callable[[Any], bool], path: object
) -> None:
    """Compare the names and shapes of weights; every one must be there, fit and be finite.

    Args:
        saved: arrays by name, as they were read.
        expected: those of the network that takes them up.
        is_finite: whether something is an array of finite numbers.
        path: of the checkpoint.

    Raises:
        UsageError: naming the first that does not fit.
    """
    for name, array in expected.items():
        if name not in saved:
            raise UsageError(
                f"checkpoint {path} lacks {name}: it is of another kind of policy; keep the env and agent settings of "
                "its run (config.yaml)"
            )
        if not is_finite(saved[name]):
            raise UsageError(f"checkpoint {path} has {name} that is no tensor of finite numbers; use an older one")
        if tuple(saved[name].shape) != tuple(array.shape):
            raise UsageError(
                f"checkpoint {path} has {name} of shape {tuple(saved[name].shape)}, the config asks for "
                f"{tuple(array.shape)}; use the agent settings it was made with"
            )
    for name in saved:
        if name not in expected:
            raise UsageError(f"checkpoint {path} has {name}, which the config has no place for; use its agent settings")

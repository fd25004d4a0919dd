"""A trained policy as files that run without lockstep: ONNX and TorchScript, checked against the policy itself."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.core.errors import RunError, UsageError, in_one_line
from lockstep.core.files import explain, is_file, is_folder, require_place, sync_tree, unfinished
from lockstep.recipes.catalog import TASKS, make_task
from lockstep.session.policy import checkpoint_of, load_policy

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig
    from lockstep.session.deployed import DeployedPolicy
    from lockstep.session.policy import Policy

FORMATS = {"onnx": "policy.onnx", "torchscript": "policy.pt"}
"""Names of the files."""
DESCRIPTION = "policy.json"
FOLDER = "export"
"""Of a run directory, where files go by default."""
_MEANINGS = {
    "mean": "the mean of the policy, {} entries, not clipped",
    "squashed": "the middle of the policy, {} entries in [-1, 1]",
    "choice": "the likeliest of {} choices, from 0 on",
}
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    largest_difference: float
    """Between an action of a file and the policy's own; see ``export_check.TOLERANCE``."""


def export(path: str | Path, output: str | Path | None = None, formats: Sequence[str] = tuple(FORMATS)) -> Exported:
    """Write a policy as files that take raw actor observations and give the most likely actions.

    Each file is run, by onnxruntime and by torch, and compared with the policy's own actions on random and on extreme
    observations; only then do the files appear, together.

    Args:
        path: of a checkpoint, or of a run directory for its newest one; of either framework.
        output: the folder; None for ``export`` in the run directory.
        formats: ``onnx`` (needs the extra ``onnx``), ``torchscript``, or both.

    Raises:
        UsageError: no such checkpoint, one whose networks are not lockstep's, packages that are missing, or a folder
            that can't be written to, or where a file of another format is that would stay; nothing is written.
        RunError: a file does not do what the policy does, or could not be written; none of the files stays.
    """
    _check_formats(formats)
    folder = Path(output) if output is not None else _default_folder(Path(path))
    require_place("output", folder.absolute())
    _check_room(folder, formats)
    checkpoint = checkpoint_of(path)
    policy = load_policy(checkpoint, "cpu")
    from lockstep.session.deployed import deploy, to_compare_with
    from lockstep.session.export_check import TOLERANCE, Check
    from lockstep.session.export_files import write

    network = deploy(policy)
    check = Check(to_compare_with(policy), network)
    description = _describe(policy, network, checkpoint) | {
        "files": [FORMATS[form] for form in formats],
        "check": {"tolerance": TOLERANCE, "num_observations": check.num_rows},
    }
    files = (*(FORMATS[form] for form in formats), DESCRIPTION)
    with _made(folder), unfinished(folder / DESCRIPTION, folder) as temporary:
        temporary.mkdir()
        differences = [write(form, network, temporary / FORMATS[form], description, check) for form in formats]
        description["check"] |= {"largest_difference": max(differences)}
        text = json.dumps(description, indent=2, allow_nan=False)
        (temporary / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        sync_tree(temporary)
        for name in files:
            (temporary / name).replace(folder / name)
    return Exported(folder, files, max(differences))


def _check_formats(formats: Sequence[str]) -> None:
    for name in formats:
        if name not in FORMATS:
            raise UsageError(f"format {name!r} is unknown; use {' or '.join(FORMATS)}, or both: {','.join(FORMATS)}")
    if not formats or len(set(formats)) < len(formats):
        raise UsageError(f"formats {','.join(formats)!r} must name each format once; use {','.join(FORMATS)}")
    if "onnx" in formats:
        _check_packages()


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"format onnx needs {', '.join(missing)}, not installed here; install it with: pip install "
            "'lockstep-rl[onnx]', or use --format torchscript"
        )
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that it lacks, one of another version, or whatever it raises itself
            raise UsageError(
                f"format onnx needs {name}, which is installed but can't be imported ({in_one_line(error)}); install "
                "it anew, or use --format torchscript"
            ) from error


def _check_room(folder: Path, formats: Sequence[str]) -> None:
    """Refuse a folder where a file can't go, or where one of another policy would stay beside the new description."""
    for name in (*(FORMATS[form] for form in formats), DESCRIPTION):
        if is_folder(folder / name):
            raise UsageError(f"{folder / name} is a folder, so no file; remove it, or choose another --output")
    for form in FORMATS.keys() - set(formats):
        path = folder / FORMATS[form]
        if is_file(path):
            raise UsageError(
                f"{path} is there already and would stay, though the new {DESCRIPTION} is not about it; use --format "
                f"{','.join(FORMATS)}, remove it, or choose another --output"
            )


def _default_folder(path: Path) -> Path:
    """Return where the files of a run, or of a checkpoint, go: into the run directory, or beside the checkpoint."""
    run = path if is_file(path / "config.yaml") else path.resolve().parent.parent
    return run / FOLDER if is_file(run / "config.yaml") else path.parent / FOLDER


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Have a folder there; if what is done with it fails, it is gone again, unless it was there before."""
    new = [one for one in (folder, *folder.parents) if not is_folder(one)]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(explain(error, folder)) from error
        yield
    except BaseException:
        for one in new:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def _page_of(config: TrainConfig) -> str:
    """Return where it is told what each entry means."""
    entry = TASKS.get(config.task)
    if entry.suite is None:
        return f"src/lockstep/tasks/{config.task}/README.md tells each"
    library = entry.suite.distribution.name
    return f"{library} tells each of its {entry.env_id}; continuous actions are the policy's, before they are scaled"


def _describe(policy: Policy, network: DeployedPolicy, checkpoint: Path) -> dict[str, Any]:
    """Return what whoever runs the files has to know, as plain values."""
    config = policy.config
    task = make_task(config)
    space = task.action_space
    is_continuous = space.kind == "continuous"
    num_parts, _, width = network.initial_state(1).shape
    return {
        "lockstep_version": version("lockstep-rl"),
        "task": config.task,
        "checkpoint": str(checkpoint),
        "iteration": policy.iteration,
        "ml_framework": config.ml_framework,
        "algorithm": config.algorithm,
        "step_duration_s": task.step_duration_s,
        "observations": {
            "name": "observations",
            "dtype": "float32",
            "shape": ["batch", policy.num_observations],
            "meaning": f"group actor of the task, raw: they are normalised inside; {_page_of(config)}",
        },
        "actions": {
            "name": "actions",
            "kind": space.kind,
            "dtype": "float32" if is_continuous else "int64",
            "shape": ["batch", space.size] if is_continuous else ["batch"],
            "meaning": f"{_MEANINGS[network.head].format(space.size)}; {_page_of(config)}",
        },
        "state": {
            "input": "state",
            "output": "next_state",
            "dtype": "float32",
            "shape": [num_parts, "batch", width],
            "start": 0.0,
        }
        if network.memory is not None
        else None,
        "env": config.env.model_dump(mode="json"),
        "model": _describe_model(task.model_path),
    }


def _describe_model(path: Path | None) -> dict[str, Any] | None:
    """Return the names in a MuJoCo model, in their order, and the duration of a physics step."""
    if path is None:
        return None
    import mujoco

    model = mujoco.MjModel.from_xml_path(str(path))
    return {
        "physics_step_duration_s": float(model.opt.timestep),
        "joints": [model.joint(index).name for index in range(model.njnt)],
        "actuators": [model.actuator(index).name for index in range(model.nu)],
    }

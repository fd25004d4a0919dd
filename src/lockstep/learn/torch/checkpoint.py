"""Checkpoints of torch runs: reading them safely and saying what is wrong with one."""

import lzma
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.core.errors import UsageError

FORMAT = 1
REQUIRED = {
    "format": int,
    "ml_framework": str,
    "task": str,
    "config": dict,
    "iteration": int,
    "env_steps": int,
    "policy": dict,
}


class DamagedError(UsageError):
    """A checkpoint is not what was written."""


def load(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file, all tensors on the CPU; nothing in the file is executed.

    Raises:
        DamagedError: truncated or damaged.
        UsageError: missing, unreadable, or not a checkpoint of a torch run.
    """
    if os.path.isdir(path):  # noqa: PTH112 - pathlib raises for a name that is too long
        raise UsageError(f"checkpoint {path} is a folder; name a file such as {path}/model_100.pt")
    if not os.path.exists(path):  # noqa: PTH110
        raise UsageError(
            f"checkpoint {path} does not exist; 'checkpoints/' of a run directory has model_<iteration>.pt"
        )
    if not os.path.isfile(path):  # noqa: PTH113
        raise UsageError(f"checkpoint {path} is no file; name one such as checkpoints/model_100.pt of a run directory")
    try:
        # torch reads a damaged archive without a word as long as its directory is whole; the sums tell.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise DamagedError(f"checkpoint {path} is damaged ({damaged}); use an older one")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DamagedError(
            f"checkpoint {path} is truncated or no checkpoint ({str(error) or 'it ends early'}); use an older one"
        ) from None
    except PermissionError:
        raise UsageError(f"checkpoint {path} can't be read: permission denied") from None
    except UsageError:
        raise
    except Exception as error:  # a reader that stumbles over damaged bytes may do so in any way
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UsageError(f"checkpoint {path} is not a lockstep checkpoint ({reason})") from None
    if not isinstance(content, dict) or not content.keys() >= REQUIRED.keys():
        raise UsageError(f"checkpoint {path} is not a lockstep checkpoint; it lacks what lockstep writes")
    for name, kind in REQUIRED.items():
        if not isinstance(content[name], kind):
            raise UsageError(f"checkpoint {path} has {name} of type {type(content[name]).__name__}; use another one")
    if content["format"] != FORMAT:
        raise UsageError(f"checkpoint {path} has format {content['format']}, this version reads format {FORMAT}")
    if content["ml_framework"] != "torch":
        raise UsageError(f"checkpoint {path} is of framework '{content['ml_framework']}', not torch")
    return content


def save(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with all tensors on the CPU, so that any machine reads it."""
    snapshot(content)(path)


def snapshot(content: dict[str, Any]) -> Callable[[Path], None]:
    """Copy a checkpoint's content to the CPU and return what writes the copy, in any thread.

    The content may change from then on. Copies from a GPU are only queued here, behind what it has to do anyway; who
    writes them waits for them.
    """
    devices: set[torch.device] = set()
    copied = _on_host(content, devices)
    queued = [torch.cuda.current_stream(device).record_event() for device in devices]

    def write(path: Path) -> None:
        for event in queued:
            event.synchronize()
        # Not by its name: torch would write it in C++, and keep other threads out of Python for longer.
        with path.open("wb") as file:
            torch.save(copied, file)

    return write


def _on_host(value: Any, devices: set[torch.device]) -> Any:
    """Return a nest with its tensors copied; the GPUs from which copies are on their way are added to ``devices``."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cuda":
            return value.detach().to("cpu", copy=True)
        devices.add(value.device)
        return value.detach().to("cpu", non_blocking=True)
    if isinstance(value, dict):
        return {name: _on_host(inner, devices) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(inner, devices) for inner in value)
    return value


def check_like(saved: Any, expected: Any, path: object, name: str) -> None:
    """Compare names, shapes and dtypes of two nests of dicts and tensors.

    Raises:
        UsageError: naming the first entry of ``saved`` that does not fit.
    """
    if isinstance(expected, dict):
        for inner, value in expected.items():
            if not isinstance(saved, dict) or inner not in saved:
                raise UsageError(f"checkpoint {path} lacks {name}.{inner}, so a run can't resume from it")
            check_like(saved[inner], value, path, f"{name}.{inner}")
    elif isinstance(expected, torch.Tensor):
        found = (tuple(saved.shape), saved.dtype) if isinstance(saved, torch.Tensor) else type(saved).__name__
        if found != (tuple(expected.shape), expected.dtype):
            wanted = f"{tuple(expected.shape)} of {expected.dtype}"
            raise UsageError(
                f"checkpoint {path} has {name} as {found}, not {wanted}; use the settings it was made with"
            )


def load_strictly(module: nn.Module, saved: dict[str, torch.Tensor], path: object) -> None:
    """Load parameters and buffers; every name and shape must fit.

    Raises:
        UsageError: naming the first that does not.
    """
    expected = module.state_dict()
    for name, tensor in expected.items():
        if name not in saved:
            raise UsageError(
                f"checkpoint {path} lacks {name}: it is of another kind of policy; keep the env and agent settings of "
                "its run (config.yaml)"
            )
        if not isinstance(saved[name], torch.Tensor) or not torch.isfinite(saved[name]).all():
            raise UsageError(f"checkpoint {path} has {name} that is no tensor of finite numbers; use an older one")
        if saved[name].shape != tensor.shape:
            raise UsageError(
                f"checkpoint {path} has {name} of shape {tuple(saved[name].shape)}, the config asks for "
                f"{tuple(tensor.shape)}; use the agent settings it was made with"
            )
    for name in saved:
        if name not in expected:
            raise UsageError(f"checkpoint {path} has {name}, which the config has no place for; use its agent settings")
    module.load_state_dict(saved, strict=True)

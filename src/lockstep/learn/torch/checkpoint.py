"""Checkpoints of torch runs: reading them safely and saying what is wrong with one."""

import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.learn.resuming import HEADER_FILE, other_framework, require_header, require_weights
from lockstep.learn.resuming import DamagedError as DamagedError

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


def load(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file, all tensors on the CPU; nothing in the file is executed.

    Raises:
        DamagedError: truncated or damaged.
        UsageError: missing, unreadable, or not a checkpoint of a torch run.
    """
    if os.path.exists(os.path.join(path, HEADER_FILE)):  # noqa: PTH110, PTH118
        raise other_framework(path, "jax", "torch")
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
    require_header(content, REQUIRED, FORMAT, "torch", path)
    checked: dict[str, Any] = content
    return checked


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


def load_strictly(module: nn.Module, saved: dict[str, torch.Tensor], path: object) -> None:
    """Load parameters and buffers; every name and shape must fit.

    Raises:
        UsageError: naming the first that does not.
    """
    require_weights(saved, module.state_dict(), _is_finite, path)
    module.load_state_dict(saved, strict=True)


@contextmanager
def misfits_in_words(path: object) -> Iterator[None]:
    """Turn what a library says of a state that does not fit its networks into one line, which all ranks say alike.

    Memory that is short, a GPU that fails and a rank that is lost remain what they are.

    Raises:
        UsageError: the state was made with other settings.
    """
    try:
        yield
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        is_of_machine = isinstance(error, RuntimeError) and type(error) is not RuntimeError
        if is_of_machine or "allocate memory" in str(error):
            raise
        *_, last = str(error).strip().splitlines() or [""]
        words = last.strip().rstrip(".")
        reason = words if isinstance(error, RuntimeError) else f"{type(error).__name__}: {words}"
        raise UsageError(
            f"checkpoint {path} does not fit agent.* and library.* here ({reason}); use the settings it was made with",
            shared=True,
        ) from error


def _is_finite(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(torch.isfinite(value).all())

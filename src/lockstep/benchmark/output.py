"""Where the result of a benchmark goes: a file, and the screen."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from lockstep.benchmark.bundle import write_bundle
from lockstep.benchmark.schema import Bundle
from lockstep.benchmark.summary import lines_of
from lockstep.core.errors import UsageError
from lockstep.core.files import is_folder, require_place


def default_path(log_root: str, kind: str, task: str) -> Path:
    """Return a name of its own for the bundle of a benchmark that begins now."""
    return Path(log_root) / "benchmark" / f"{kind}_{task}_{datetime.now():%Y-%m-%d_%H-%M-%S-%f}.json"


def check_place(path: Path) -> None:
    """Refuse a file that can't be written, before there is anything to write; its folder is made.

    Raises:
        UsageError: it can't.
    """
    if is_folder(path):
        raise UsageError(f"output {path} is a folder; give the path of a file, as in --output {path}/result.json")
    require_place("output", path.absolute().parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"output {path}: its folder can't be made ({reason}); choose another --output") from None


def keep(bundle: Bundle, path: Path, say: Callable[[str], object]) -> None:
    """Write a bundle and show what it says.

    Raises:
        RunError: the disk refuses; what the bundle says has been shown.
    """
    for line in lines_of(bundle):
        say(line)
    write_bundle(bundle, path)
    say(f"written: {path}; look at it with lockstep report {path}")

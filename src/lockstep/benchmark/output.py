"""Where the result of a benchmark goes: a file, and the screen."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from lockstep.benchmark.bundle import write_bundle
from lockstep.benchmark.schema import Bundle, Kind
from lockstep.benchmark.summary import lines_of
from lockstep.core.errors import UsageError
from lockstep.core.files import is_folder, require_place, require_regular
from lockstep.learn.config import TrainConfig
from lockstep.recipes.libraries import OWN


def default_path(config: TrainConfig, kind: Kind, num_ranks: int) -> Path:
    """Return a name of its own for the bundle of a benchmark that begins now."""
    task = config.task.replace("/", "_")  # of suites it has a slash
    library = "" if config.rl_library == OWN else f"{config.rl_library}_"
    what = f"{kind}_{task}_{library}{config.ml_framework}_{num_ranks}_rank{'s' if num_ranks > 1 else ''}"
    return Path(config.log_root) / "benchmark" / f"{what}_{datetime.now():%Y-%m-%d_%H-%M-%S-%f}.json"


def check_place(path: Path) -> None:
    """Refuse a file that can't be written, before there is anything to write; its folder is made.

    Raises:
        UsageError: it can't.
    """
    if is_folder(path):
        raise UsageError(f"output {path} is a folder; give the path of a file, as in --output {path}/result.json")
    require_regular("output", path)
    require_place("output", path.absolute().parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"output {path}: its folder can't be made ({reason}); choose another --output") from None


def keep(bundle: Bundle, path: Path, say: Callable[[str], object]) -> None:
    """Write a bundle, then show what it says: whoever reads the screen may be gone.

    Raises:
        RunError: the disk refuses; what the bundle says is shown all the same.
    """
    try:
        write_bundle(bundle, path.resolve())  # what a link leads to, not the link
    finally:
        for line in lines_of(bundle):
            say(line)
    say(f"written: {path}; look at it with lockstep report {path}")

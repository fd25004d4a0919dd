"""What a report is made of: run directories, bundles and scaling sweeps, told apart by what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.benchmark.bundle import parse_bundle
from lockstep.benchmark.report.run_record import RunRecord, read_run
from lockstep.benchmark.scaling.result import ScalingResult, is_scaling, parse_scaling
from lockstep.benchmark.schema import Bundle
from lockstep.core.errors import UsageError
from lockstep.core.files import exists, is_folder, read_json, why_unseen


@dataclass(frozen=True)
class Inputs:
    """What could be read, in the order in which it was given, and a line for each that could not."""

    runs: tuple[RunRecord, ...]
    bundles: tuple[tuple[Path, Bundle], ...]
    left_out: tuple[str, ...]
    sweeps: tuple[tuple[Path, ScalingResult], ...] = ()


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read run directories, bundles and the results of sweeps.

    Raises:
        UsageError: nothing is there by one of the names, or none of them can be read.
    """
    for path in paths:
        if not exists(path):
            why = why_unseen(path)
            raise UsageError(f"there is no {path}{why}; give run directories, or bundles that lockstep benchmark wrote")
    runs: list[RunRecord] = []
    bundles: list[tuple[Path, Bundle]] = []
    sweeps: list[tuple[Path, ScalingResult]] = []
    left_out: list[str] = []
    for path in paths:
        try:
            if is_folder(path):
                runs.append(read_run(path))
                continue
            found = _read_file(path)
            if isinstance(found, Bundle):
                bundles.append((path, found))
            else:
                sweeps.append((path, found))
        except UsageError as error:
            left_out.append(str(error))
    if not runs and not bundles and not sweeps:
        more = f" (nor can {len(left_out) - 1} more be read)" if len(left_out) > 1 else ""
        raise UsageError(f"{left_out[0]}{more}")
    return Inputs(tuple(runs), tuple(bundles), tuple(left_out), tuple(sweeps))


def _read_file(path: Path) -> Bundle | ScalingResult:
    try:
        content = read_json(path)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}; make it readable") from None
    except ValueError as error:
        raise UsageError(
            f"{path} is no JSON ({error}); give run directories, or bundles that lockstep benchmark wrote"
        ) from None
    return parse_scaling(content, str(path)) if is_scaling(content) else parse_bundle(content, str(path))

"""Bundles on the disk: written whole or not at all, read with every field checked."""

from pathlib import Path
from typing import Any

from lockstep.benchmark.record_files import RecordFile
from lockstep.benchmark.schema import SCHEMA_VERSION, Bundle
from lockstep.core.errors import UsageError

_FILE = RecordFile(Bundle, SCHEMA_VERSION, "bundle", "lockstep benchmark")


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write a bundle as JSON, whole or not at all.

    Raises:
        RunError: the system refuses.
    """
    _FILE.write(bundle, path)


def read_bundle(path: Path) -> Bundle:
    """Return the bundle in a file.

    Raises:
        UsageError: it can't be read, is no bundle, or is one of another version of the schema.
    """
    return parse_bundle(_FILE.read(path), str(path))


def parse_bundle(content: Any, name: str) -> Bundle:
    """Return a bundle from what JSON gave.

    Args:
        content: of the file.
        name: of the file, in messages.

    Raises:
        UsageError: it is no bundle, or one of another version of the schema.
    """
    if not isinstance(content, dict) or "schema_version" not in content:
        raise UsageError(f"{name} is no bundle: it has no schema_version; give a file that lockstep benchmark wrote")
    if content.get("kind") == "scaling":
        raise UsageError(
            f"{name} is the result of a sweep, not a bundle; give bundles of its jobs (gpus_*.json beside it), or see "
            "all of it with lockstep report"
        )
    return _FILE.parse(content, name)

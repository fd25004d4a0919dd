"""Bundles on the disk: written whole or not at all, read with every field checked."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.benchmark.schema import SCHEMA_VERSION, Bundle
from lockstep.core.config import show
from lockstep.core.errors import UsageError
from lockstep.core.files import read_json, write_atomic

_ANEW = "make it anew with this version's lockstep benchmark"


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write a bundle as JSON, whole or not at all.

    Raises:
        RunError: the system refuses.
    """
    write_atomic(path, bundle.model_dump_json(indent=1) + "\n")


def read_bundle(path: Path) -> Bundle:
    """Return the bundle in a file.

    Raises:
        UsageError: it can't be read, is no bundle, or is one of another version of the schema.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise UsageError(
            f"bundle {path}: {error.strerror or error}; give a file that lockstep benchmark wrote"
        ) from None
    except ValueError as error:
        raise UsageError(f"bundle {path} is no JSON ({error}); give a file that lockstep benchmark wrote") from None
    return parse_bundle(content, str(path))


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
    version = content["schema_version"]
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        age = "older than" if isinstance(version, int) and version < SCHEMA_VERSION else "not"
        raise UsageError(
            f"bundle {name} has schema_version {show(version)}, {age} the {SCHEMA_VERSION} that this lockstep reads; "
            f"{_ANEW}, or read it with the lockstep that wrote it"
        )
    try:
        return Bundle.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise UsageError(
            f"bundle {name} is damaged: {place}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}; {_ANEW}"
        ) from None

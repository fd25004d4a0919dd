"""Records on the disk, with the version of their schema in front: written whole or not at all, read strictly."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from lockstep.benchmark.schema import Record
from lockstep.core.config import show
from lockstep.core.errors import UsageError
from lockstep.core.files import read_json, write_atomic

RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True)
class RecordFile(Generic[RecordT]):
    """How a kind of record is read, and spoken of."""

    model: type[RecordT]
    version: int
    """Of its schema, that this lockstep reads and writes."""
    name: str
    """What such a file is called in messages."""
    writer: str
    """The command that writes one."""

    def write(self, record: RecordT, path: Path) -> None:
        """Write a record as JSON, whole or not at all.

        Raises:
            RunError: the system refuses.
        """
        write_atomic(path, record.model_dump_json(indent=1) + "\n")

    def read(self, path: Path) -> Any:
        """Return what JSON gives of a file.

        Raises:
            UsageError: it can't be read, or is no JSON.
        """
        mend = f"give a file that {self.writer} wrote"
        try:
            return read_json(path)
        except OSError as error:
            raise UsageError(f"{self.name} {path}: {error.strerror or error}; {mend}") from None
        except ValueError as error:
            raise UsageError(f"{self.name} {path} is no JSON ({error}); {mend}") from None

    def parse(self, content: dict[str, Any], name: str) -> RecordT:
        """Return a record from what JSON gave.

        Args:
            content: of the file.
            name: of the file, in messages.

        Raises:
            UsageError: it is of another version, or not as that version has it.
        """
        version, anew = content["schema_version"], f"make it anew with this version's {self.writer}"
        if isinstance(version, bool) or version != self.version:
            age = "older than" if isinstance(version, int) and version < self.version else "not"
            raise UsageError(
                f"{self.name} {name} has schema_version {show(version)}, {age} the {self.version} that this lockstep "
                f"reads; {anew}, or read it with the lockstep that wrote it"
            )
        try:
            return self.model.model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "the whole"
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            said = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
            raise UsageError(f"{self.name} {name} is damaged: {place}: {said}{more}; {anew}") from None

"""``lockstep export``: write a trained policy as files that run without lockstep."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from lockstep.cli.arguments import Takes, asks_for_help, parse, path_of
from lockstep.cli.play import checkpoint_in
from lockstep.cli.usage import EXPORT_HABITS, EXPORT_HELP, unexpected_word, unknown_flag

_FLAGS = {"run": Takes.ONE, "checkpoint": Takes.ONE, "output": Takes.ONE, "format": Takes.ONE}


def main(argv: Sequence[str]) -> int:
    """Export, say where the files are, and return the exit code."""
    if asks_for_help(argv):
        print(EXPORT_HELP, end="")
        return 0
    arguments = parse(argv, _lookup)
    for word in arguments.positionals:
        raise unexpected_word(word)
    output, formats = path_of(arguments, "output"), arguments.last("format")
    checkpoint = checkpoint_in(arguments, "export")
    from lockstep.session.export import FORMATS, export

    with contextlib.redirect_stdout(sys.stderr):
        exported = export(checkpoint, output, [*FORMATS] if formats is None else formats.lower().split(","))
    for name in exported.files:
        print(exported.folder / name)
    print(f"the same actions as the policy's own, to {exported.largest_difference:.1g}")
    return 0


def _lookup(name: str) -> Takes:
    if name not in _FLAGS:
        raise unknown_flag(name, _FLAGS, EXPORT_HABITS)
    return _FLAGS[name]

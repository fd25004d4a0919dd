"""``lockstep benchmark compare``: which of several benchmarks was faster, where, and what else was different."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.arguments import Takes, asks_for_help, parse, switched_on
from lockstep.cli.usage import unknown_flag
from lockstep.core.errors import UsageError

HELP = """\
usage: lockstep benchmark compare BUNDLE BUNDLE [BUNDLE ...] [--strong] [--json]

Compare the bundles that lockstep benchmark wrote with the first of them: throughput, how long an iteration takes, where
its time goes, and which versions, hardware and settings are different. They must be of one kind and one task, and have
the same number of envs on every rank.

  --strong   compare equal numbers of envs in total instead, however they are dealt to the ranks
  --json     print one JSON object and nothing else
"""

_FLAGS = {"strong": Takes.SWITCH, "json": Takes.SWITCH}

_FILES = "the bundles are given without flags, as in lockstep benchmark compare before.json after.json"

_HABITS = {
    **dict.fromkeys(("bundle", "bundles", "input", "inputs", "file", "files", "before", "after"), _FILES),
    **dict.fromkeys(("baseline", "reference", "base"), "the first bundle is what the others are compared with"),
    **dict.fromkeys(("weak", "weak_scaling"), "equal envs on every rank are the default; leave it out"),
    **dict.fromkeys(("strong_scaling", "total_envs", "total"), "equal numbers of envs in total are --strong"),
    **dict.fromkeys(("html", "output", "out", "report"), "a page is made by lockstep report BUNDLE BUNDLE"),
    **dict.fromkeys(("format", "as_json"), "for programs there is --json"),
}


def main(argv: Sequence[str]) -> int:
    """Compare what the command line names, print it, and return the exit code.

    Args:
        argv: the words after ``compare``.
    """
    if asks_for_help(argv):
        print(HELP, end="")
        return 0
    arguments = parse(argv, _lookup)
    strong, as_json = switched_on(arguments, "strong"), switched_on(arguments, "json")
    words = arguments.positionals
    if len(words) < 2:
        raise UsageError(
            f"{len(words) or 'no'} bundle{'' if len(words) == 1 else 's'} given; give two or more, "
            "as in lockstep benchmark compare before.json after.json"
        )
    for word in words:
        if not word or "\0" in word:
            raise UsageError(f"a bundle is the path of a file, not {word!r}")
    from lockstep.benchmark.bundle import read_bundle
    from lockstep.benchmark.comparison.compare import compare

    names = short_names(words)
    comparison = compare([read_bundle(Path(word)) for word in words], names, strong)
    if as_json:
        print(comparison.model_dump_json())
        return 0
    from rich.console import Console

    from lockstep.benchmark.comparison.screen import WIDTH, render

    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(render(comparison))
    return 0


def short_names(words: Sequence[str]) -> list[str]:
    """Return the names of files without folder and ending, or the whole paths where those are not distinct."""
    stems = [Path(word).stem or word for word in words]
    names = stems if len(set(stems)) == len(stems) else list(words)
    # Even one and the same file may be named twice.
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def _lookup(name: str) -> Takes:
    if name not in _FLAGS:
        raise unknown_flag(name, _FLAGS, _HABITS)
    return _FLAGS[name]

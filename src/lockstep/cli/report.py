"""``lockstep report``: one HTML page of runs and benchmarks, that needs no network."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.arguments import Arguments, Takes, asks_for_help, parse, path_of
from lockstep.cli.benchmark_compare import short_names
from lockstep.cli.usage import unknown_flag
from lockstep.core.errors import UsageError
from lockstep.core.files import exists, is_folder, require_regular

HELP = """\
usage: lockstep report RUN_DIR_OR_BUNDLE [RUN_DIR_OR_BUNDLE ...] [--output FILE.html]

Make one HTML page of runs and of what lockstep benchmark wrote (bundles, and scaling.json of a sweep): learning curves,
throughput, where the time goes, a table of all ranks, hardware, versions and settings; several bundles of one kind and
task are compared. The page needs no network and no other file; it reads on a phone and on paper, in light and dark.

  --output FILE.html   the page (default: report.html, in the run directory if one run is all that is given, else here);
                       an older one is replaced
"""

_FLAGS = {"output": Takes.ONE}

_PATHS = "run directories and bundles are given without flags, as in lockstep report logs/<task>/<run> bundle.json"

_HABITS = {
    **dict.fromkeys(("run", "runs", "run_dir", "logdir", "log_dir", "load_run"), _PATHS),
    **dict.fromkeys(("bundle", "bundles", "input", "inputs", "files"), _PATHS),
    **dict.fromkeys(("out", "output_dir", "path", "html", "file", "save"), "the page's file is --output FILE.html"),
    **dict.fromkeys(("open", "show", "browser"), "the page is a file: open it in any browser"),
    **dict.fromkeys(("dark", "light", "theme"), "the page follows the reader's own setting; leave it out"),
    "json": "a bundle is JSON already, and so is progress.json of a run; leave it out",
}


def main(argv: Sequence[str]) -> int:
    """Write the page, say where it is, and return the exit code.

    Args:
        argv: the words after ``report``.
    """
    if asks_for_help(argv):
        print(HELP, end="")
        return 0
    arguments = parse(argv, _lookup)
    words = arguments.positionals
    if not words:
        raise UsageError("what to report on? Give run directories or bundles, as in lockstep report logs/<task>/<run>")
    for word in words:
        if not word or "\0" in word:
            raise UsageError(f"a run directory or bundle is a path, not {word!r}")
    paths = [Path(word) for word in words]
    output = _output(arguments, paths)
    from lockstep.benchmark.report.inputs import read_inputs
    from lockstep.benchmark.report.page import make_page
    from lockstep.core.files import write_atomic

    inputs = read_inputs(paths)
    files = list(dict.fromkeys(path for path, _ in (*inputs.bundles, *inputs.sweeps)))
    page = make_page(inputs, dict(zip(files, short_names([str(path) for path in files]), strict=True)))
    write_atomic(output, page)
    for note in inputs.left_out:
        print(f"left out: {note}", file=sys.stderr)
    print(f"report: {output}")
    return 0


def _output(arguments: Arguments, paths: Sequence[Path]) -> Path:
    """Return where the page is to be written.

    Raises:
        UsageError: it can't be there.
    """
    output = path_of(arguments, "output")
    if output is None:
        return paths[0] / "report.html" if len(paths) == 1 and is_folder(paths[0]) else Path("report.html")
    if is_folder(output):
        raise UsageError(f"--output {output} is a folder; name a file in it, as {output / 'report.html'}")
    if not is_folder(output.parent):
        why = "is no folder" if exists(output.parent) else "does not exist"
        raise UsageError(f"--output {output} can't be written: {output.parent} {why}; make it, or name another file")
    require_regular("--output", output)
    if any(exists(path) and output.resolve() == path.resolve() for path in paths):
        raise UsageError(f"--output {output} would replace what the report is made of; name another file")
    return output


def _lookup(name: str) -> Takes:
    if name not in _FLAGS:
        raise unknown_flag(name, _FLAGS, _HABITS)
    return _FLAGS[name]

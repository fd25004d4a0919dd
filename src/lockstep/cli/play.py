"""``lockstep play``: run a trained policy and report what it reached."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.arguments import Arguments, Takes, asks_for_help, number, parse, path_of, switched_on
from lockstep.cli.usage import PLAY_HABITS, PLAY_HELP, unexpected_word, unknown_flag
from lockstep.core.config import show
from lockstep.core.errors import UsageError
from lockstep.core.files import why_unseen

if TYPE_CHECKING:
    from lockstep.session.video import Video

_FLAGS = {
    "run": Takes.ONE,
    "checkpoint": Takes.ONE,
    "num_episodes": Takes.ONE,
    "seed": Takes.ONE,
    "device": Takes.ONE,
    "json": Takes.SWITCH,
    "video": Takes.ONE,
    "video_size": Takes.ONE,
    "video_seconds": Takes.ONE,
    "viewer": Takes.SWITCH,
}
_NOT_WITH_VIEWER = ("num_episodes", "json", "video")


def main(argv: Sequence[str]) -> int:
    """Play, print the results, and return the exit code."""
    if asks_for_help(argv):
        print(PLAY_HELP, end="")
        return 0
    arguments = parse(argv, _lookup)
    for word in arguments.positionals:
        raise unexpected_word(word)
    num_episodes = number("num_episodes", arguments.flags.get("num_episodes", ["64"]), minimum=1)
    seed = number("seed", arguments.flags["seed"], minimum=0) if "seed" in arguments.flags else None
    device = arguments.last("device") or "auto"
    as_json = switched_on(arguments, "json")
    with_viewer = _with_viewer(arguments)
    video = _video(arguments)
    checkpoint = checkpoint_in(arguments)
    if with_viewer:
        from lockstep.session.viewer import watch

        watch(checkpoint, seed, device)
        return 0
    from lockstep.session.play import play

    # Whatever a library prints must not get between the caller and the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        results = play(checkpoint, num_episodes, seed, device, video)
    if as_json:
        print(json.dumps({name: _json_value(value) for name, value in results.items()}))
    else:
        _print_table(results | ({} if video is None else {"video": str(video.path)}))
    return 0


def _lookup(name: str) -> Takes:
    if name not in _FLAGS:
        raise unknown_flag(name, _FLAGS, PLAY_HABITS)
    return _FLAGS[name]


def checkpoint_in(arguments: Arguments, verb: str = "play") -> Path:
    """Return the checkpoint that ``--run`` or ``--checkpoint`` names.

    Raises:
        UsageError: neither, both, or one that is not there.
    """
    run, checkpoint = path_of(arguments, "run"), path_of(arguments, "checkpoint")
    if run and checkpoint:
        raise UsageError("both --run and --checkpoint are given; keep one")
    if checkpoint:
        if why := why_unseen(checkpoint):
            raise UsageError(f"checkpoint {checkpoint} can't be looked at{why}; give the path of another")
        return checkpoint
    if not run:
        raise UsageError(f"what to {verb}? Give --run RUN_DIR or --checkpoint PATH")
    from lockstep.core.run_directory import latest_checkpoint

    return latest_checkpoint(run)


def _with_viewer(arguments: Arguments) -> bool:
    if not switched_on(arguments, "viewer"):
        return False
    for name in _NOT_WITH_VIEWER:
        if name in arguments.flags:
            raise UsageError(
                f"--viewer shows episodes until its window is closed, and reports nothing; leave --{name} out"
            )
    return True


def _video(arguments: Arguments) -> Video | None:
    path = path_of(arguments, "video")
    if path is None:
        for name in ("video_size", "video_seconds"):
            if name in arguments.flags:
                raise UsageError(f"--{name} says what a video is to be like; name its file with --video out.mp4")
        return None
    from lockstep.session.video import DEFAULT_SIZE, as_video

    text = arguments.last("video_seconds")
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        raise UsageError(f"video_seconds must be a number of seconds, not {show(text)}") from None
    return as_video(path, arguments.last("video_size") or DEFAULT_SIZE, seconds)


def _json_value(value: Any) -> Any:
    """JSON has no NaN or infinity; null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_table(results: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path is of no use if its end is cut off
    for name, value in results.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 500).print(table)

"""``lockstep train_multigpu``: the same training in one process per GPU, on this node or several."""

import os
import sys
from collections.abc import Sequence

from lockstep.cli.arguments import asks_for_help, switched_on
from lockstep.cli.usage import MULTIGPU_HELP
from lockstep.core.gpu_mask import Gpu, find_gpus
from lockstep.launch.describe import concerns, describe
from lockstep.launch.devices import use_of
from lockstep.launch.local import launch
from lockstep.launch.plan import Options, Plan, Work, check_surroundings, make_plan
from lockstep.launch.screen import shows_on


def main(argv: Sequence[str]) -> int:
    """Launch the ranks, or show what would be launched, and return the exit code."""
    if asks_for_help(_before_script(argv)):
        print(MULTIGPU_HELP, end="")
        return 0
    from lockstep.cli.launch_request import options_of, split, work_of

    words = split(argv)
    options = options_of(words.own)
    check_surroundings()
    gpus = find_gpus()
    return start(options, work_of(words, options, gpus, os.environ), gpus, switched_on(words.own, "dry_run"))


def start(options: Options, work: Work, gpus: Sequence[Gpu], dry_run: bool) -> int:
    """Launch ranks, or show what would be launched, and return the exit code.

    Args:
        options: of the launcher.
        work: what each rank runs.
        gpus: what ``find_gpus`` returned.
        dry_run: only show it.

    Raises:
        UsageError: whatever can't work.
    """
    plan = make_plan(options, work, gpus)
    if dry_run:
        _show(plan)
        return 0
    say = shows_on(sys.stdout, sys.stderr)
    for warning in plan.warnings:
        say(f"lockstep: warning: {warning}", True)
    return launch(plan, say)


def _before_script(argv: Sequence[str]) -> Sequence[str]:
    """Return the words that are not a script's own."""
    for index, word in enumerate(argv):
        if word == "--script" or word.startswith("--script="):
            return argv[:index]
    return argv


def _show(plan: Plan) -> None:
    uses = {place.gpu.uuid: use for place in plan.places if place.gpu and (use := use_of(place.gpu))}
    for line in describe(plan, uses):
        print(line)
    for warning in concerns(plan, uses):
        print(f"lockstep: warning: {warning}", file=sys.stderr)

"""``lockstep train``: hand what the command line asks for to the session."""

from collections.abc import Sequence

from lockstep.cli.arguments import asks_for_help
from lockstep.cli.train_request import read


def main(argv: Sequence[str]) -> int:
    """Train, and return the exit code."""
    if asks_for_help(argv):
        from lockstep.cli.train_help import print_help

        print_help(argv)
        return 0
    request = read(argv)
    from lockstep.session.train import train

    return train(request.config, request.checkpoint, request.resume).exit_code

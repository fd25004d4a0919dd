"""``python -m lockstep``, and ``lockstep``: the command line, also as torchrun starts it."""

import sys


def run() -> int:
    """Run the command line and return its exit code, also where Ctrl-C comes before it is there to take it."""
    try:
        from lockstep.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())

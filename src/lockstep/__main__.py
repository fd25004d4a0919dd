"""``python -m lockstep``: the command line, as torchrun starts it."""

import sys

from lockstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

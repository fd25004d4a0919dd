"""The clip at the end of a training: made by a process of its own, so that nothing it meets can harm the run.

``python -m lockstep.session.clip CHECKPOINT OUTPUT PARENT_PID``
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.core.config import merge
from lockstep.core.errors import LockstepError
from lockstep.core.process_control import end_with_parent
from lockstep.distributed.timeouts import alone_s
from lockstep.distributed.topology import environment_apart
from lockstep.session.film import Filming
from lockstep.session.policy import load_policy
from lockstep.session.video import as_video, run_apart, why_it_failed

FOLDER = "videos"
CLIP_S = 5.0
"""Length of the clip."""
TIMEOUT_S = 240.0
"""How long it may take at most."""


def make_clip(checkpoint: Path, path: Path, is_enough: Callable[[], bool]) -> str:
    """Film the policy of a checkpoint.

    Args:
        checkpoint: of a run.
        path: of the video.
        is_enough: asked ten times a second whether to give up.

    Returns:
        why there is no video, in one line; "" if there is one.
    """
    timeout_s = min(TIMEOUT_S, alone_s())
    command = [sys.executable, "-m", "lockstep.session.clip", str(checkpoint), str(path), str(os.getpid())]
    try:
        code, said = run_apart(command, b"", environment_apart(), timeout_s, is_enough)
    except OSError as error:  # no memory, say
        return error.strerror or str(error)
    return "" if code == 0 else why_it_failed(code, said)


def main(arguments: Sequence[str]) -> int:
    """Film, and return the exit code; say in one line on stderr what went wrong."""
    checkpoint, output, parent = arguments
    end_with_parent(signal.SIGKILL, int(parent))
    try:
        policy = load_policy(checkpoint, "cpu")
        # The training may fill its GPU to the brim. On the CPU a task's default engine starts without compiling.
        config = merge(policy.config, {"device": "cpu", "engine": "auto"})
        Filming.of(config, as_video(output, seconds=CLIP_S)).film(policy)
    except LockstepError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

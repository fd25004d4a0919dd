"""Folders of jobs among the temporary files: whoever uses one says so, and what nobody has used for a day is left over.

Hosts and containers may share that place and not see one another's processes. So a job that lives touches its folder,
and the files in it, which a system may tidy up one by one.
"""

import contextlib
import math
import os
import time
from pathlib import Path

OLD_S = 24 * 3600.0
"""A folder that was last touched so long ago may be removed."""
RENEW_S = 600.0


class Lease:
    """Keeps a folder from getting old.

    Args:
        folder: that is in use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._renewed_s = -math.inf

    def renew(self, now_s: float) -> None:
        """Touch the folder and the files in it, if it is time to; called now and then.

        Args:
            now_s: by ``time.monotonic``.
        """
        if now_s - self._renewed_s >= RENEW_S:
            self._renewed_s = now_s
            with contextlib.suppress(OSError):
                os.utime(self._folder)
                for path in self._folder.iterdir():
                    with contextlib.suppress(OSError):
                        os.utime(path, follow_symlinks=False)


def is_old(touched_s: float) -> bool:
    """Return whether what was touched at a time, in seconds since 1970, is left over if nobody is seen to use it."""
    return time.time() - touched_s > OLD_S

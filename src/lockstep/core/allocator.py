"""Memory that is asked for again and again should not be given back in between."""

import ctypes

# mallopt(3), malloc.h of the GNU C library
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEEP = 1 << 30


def keep_large_buffers() -> bool:
    """Tell the C library to keep freed buffers of up to 1 GiB; return whether it took the advice.

    By default glibc maps every buffer above 32 MiB anew and returns memory at the heap's top, so each pass of an
    update pays for page faults that the next one pays again. Other C libraries have no ``mallopt``.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(option, KEEP) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD))

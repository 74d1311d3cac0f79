"""Child processes that end with the process that started them, in whichever way it ends."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def follow_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this signal when the parent thread ends (Linux only; elsewhere nothing happens)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    except (AttributeError, OSError):
        return

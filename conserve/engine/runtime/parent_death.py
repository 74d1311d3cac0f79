"""Child processes that end with the process that started them, in whichever way it ends."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def follow_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Have the kernel send this signal when the parent thread ends (Linux only; elsewhere nothing happens).

    With `parent`, the id of the process that forked this one, this process ends at once if that has ended already:
    the kernel sends no signal for it any more.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    except (AttributeError, OSError):
        return
    if parent is not None and os.getppid() != parent:
        os._exit(128 + number)

"""Takes something from the process that calls it, before the command of a test begins (`aimed`, `also`)."""

import os
import resource
import signal


def let_no_file_grow_beyond(num_bytes: str) -> None:
    """Have every write that makes a file longer fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), int(num_bytes)))


def become_user(number: str) -> None:
    """Give up the rights of root."""
    os.setgroups([])
    os.setuid(int(number))

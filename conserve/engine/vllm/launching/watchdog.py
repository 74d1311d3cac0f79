"""Processes that end with this one."""

import contextlib
import subprocess


class Watchdog:
    """Kills a process and its children when this process dies, even by SIGKILL.

    vLLM's engine core waits for its front end for ever, and workers follow their core only once their iteration is
    over. Only this process holds the pipe to the shell's standard input: its `read` fails when this process ends.
    (PR_SET_PDEATHSIG would fire when the launching thread ends.)
    """

    def __init__(self, process_id: int) -> None:
        children = f"$(cat /proc/{process_id}/task/*/children 2>/dev/null)"
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", f"trap '' INT TERM HUP; read _ || kill -9 {process_id} {children}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )

    def dismiss(self) -> None:
        """End the watchdog without killing anything."""
        with contextlib.suppress(BrokenPipeError):
            self._shell.communicate(b"\n")

    def kill(self) -> None:
        """Kill the watched process and its children."""
        self._shell.communicate()

"""Keys of a terminal, one by one, and a screen that is given back as it was."""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import TextIO

NAMES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x03": "q"}
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen, without a cursor
HOME, TO_END_OF_LINE, TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
MOST_BYTES = 64


class Screen:
    """A terminal that shows frames and reads keys."""

    def __init__(self, keys: TextIO, out: TextIO) -> None:
        self._keys, self._out = keys, out
        self._woken, self._wake = os.pipe()

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        found = os.get_terminal_size(self._out.fileno())
        return found.columns, found.lines

    def draw(self, lines: Sequence[str]) -> None:
        """Draw lines over the last ones, in one write: a frame is never seen half."""
        body = f"{TO_END_OF_LINE}\r\n".join(lines)
        self._out.write(f"{HOME}{body}{TO_END_OF_LINE}{TO_END}")
        self._out.flush()

    def wake(self) -> None:
        """End a wait for a key, from any thread or signal handler."""
        with contextlib.suppress(OSError):
            os.write(self._wake, b"x")

    def keys(self, seconds: float) -> list[str]:
        """Keys that were pressed; waits so long for the first."""
        ready, _, _ = select.select([self._keys.fileno(), self._woken], [], [], seconds)
        if self._woken in ready:
            os.read(self._woken, MOST_BYTES)
        if self._keys.fileno() not in ready:
            return []
        pressed = os.read(self._keys.fileno(), MOST_BYTES)
        return key_names(pressed.decode(errors="replace")) if pressed else ["q"]  # the terminal is gone


def key_names(text: str) -> list[str]:
    """Names of the keys in what a terminal sent; arrows are sequences."""
    found = []
    while text:
        arrow = next((known for known in NAMES if len(known) > 1 and text.startswith(known)), None)
        key, text = (arrow, text[len(arrow) :]) if arrow else (text[0], text[1:])
        if key == "\x1b" and text[:1] in ("[", "O"):  # of a key that means nothing here
            text = text.lstrip("[O0123456789;")[1:]
            continue
        found.append(NAMES.get(key, key))
    return found


@contextlib.contextmanager
def screen() -> Iterator[Screen]:
    """Take the terminal over; it is given back however the command ends."""
    shown = Screen(sys.stdin, sys.stdout)
    before = termios.tcgetattr(sys.stdin)
    resized = signal.signal(signal.SIGWINCH, lambda *_: shown.wake())
    try:
        tty.setcbreak(sys.stdin)
        never_suspend(sys.stdin)
        sys.stdout.write(ENTER)
        yield shown
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, resized)


def never_suspend(keys: TextIO) -> None:
    """Ignore Ctrl-Z: the shell would come back on the other screen."""
    attributes = termios.tcgetattr(keys)
    attributes[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(keys, termios.TCSADRAIN, attributes)

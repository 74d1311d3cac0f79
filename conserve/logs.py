"""Structured logs: one JSON object a line with `time`, `level`, `logger`, `message`; `job` and `row` if known.

In the text format nothing here is used: sentences for the user are printed as they are.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from conserve.variables import LOG_FORMAT

JSON = "json"
PROGRAM = "conserve"
FIELDS = ("event", "job", "row")  # of a record's `extra`
STDERR = 2


def begin() -> None:
    """Log JSON from now on: loggers, warnings, and errors that nothing caught."""
    root = logging.getLogger()
    if not any(isinstance(handler, JsonHandler) for handler in root.handlers):
        root.addHandler(JsonHandler())
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    for chatty in ("httpx", "httpcore"):  # a line for each request, which is a row
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = uncaught


def take_over() -> None:
    """Log JSON in a process of other programs' code: what they print on stdout or stderr becomes lines too."""
    begin()
    if not isinstance(sys.stdout, PrintedLines):
        sys.stdout, sys.stderr = PrintedLines("stdout"), PrintedLines("stderr")


def wanted_by(environ: Mapping[str, str]) -> bool:
    """True if the environment asks for JSON."""
    return environ.get(LOG_FORMAT) == JSON


def document(*, level: str, logger: str, message: str, at: float | None = None, **fields: Any) -> str:
    """One line; fields that are None are left out."""
    moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    said = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level.lower(),
        "logger": logger,
        "message": message,
        **{name: value for name, value in fields.items() if value is not None},
    }
    return json.dumps(said, ensure_ascii=False, default=str)


def say(message: str, *, level: str = "info", **fields: Any) -> None:
    """Write a line of the program's own."""
    emit(document(level=level, logger=PROGRAM, message=message, **fields))


def emit(line: str) -> None:
    """Write a whole line to stderr; past `PrintedLines`, which would log it again."""
    if not isinstance(sys.stderr, PrintedLines):
        print(line, file=sys.stderr, flush=True)
        return
    data = line.encode(errors="backslashreplace") + b"\n"
    while data:
        data = data[os.write(STDERR, data) :]


def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an error that nothing caught."""
    logging.getLogger(PROGRAM).critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


class JsonFormatter(logging.Formatter):
    """A record as a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record; `exception` has the traceback."""
        return document(
            level=record.levelname,
            logger=record.name,
            message=record.getMessage(),
            at=record.created,
            **{name: getattr(record, name, None) for name in FIELDS},
            process=record.processName if record.processName != "MainProcess" else None,
            exception=self.formatException(record.exc_info) if record.exc_info else None,
        )


class JsonHandler(logging.Handler):
    """Writes records as lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            emit(self.format(record))
        except Exception:
            self.handleError(record)


class PrintedLines:
    """A stream whose whole lines are logged."""

    def __init__(self, name: str) -> None:
        self._name, self._rest, self._lock = name, "", threading.Lock()
        self.encoding, self.errors = "utf-8", "backslashreplace"
        self.closed = False

    def write(self, text: str) -> int:
        """Log the lines that the text ends; the rest waits for its end."""
        with self._lock:
            *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in filter(str.strip, lines):
            emit(line if is_line(line) else document(level="info", logger=self._name, message=line))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Keep an unfinished line: its end comes."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return STDERR


def is_line(text: str) -> bool:
    """True if a text is a line of ours already."""
    return text.startswith('{"time"') and text.endswith("}")


def plain(log: str) -> str:
    """A log with each JSON line in the words of its message and its traceback."""
    return "\n".join(words(line) for line in log.splitlines())


def words(line: str) -> str:
    """Words of one line."""
    if not is_line(line):
        return line
    try:
        said = json.loads(line)
        return "\n".join(filter(None, (said["message"], said.get("exception"))))
    except (ValueError, KeyError, TypeError):  # the line that a log's tail begins with
        return line

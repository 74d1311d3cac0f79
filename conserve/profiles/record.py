"""Measurements of a profiling session, in a file that survives interruptions and failures."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from conserve.whole import write_whole


class Visit(NamedTuple):
    """One line of the session's file: a point, its times, and the time of the visit."""

    point: str
    ms: list[float]
    seconds: float


class Header(NamedTuple):
    """First line of the file: a session of another engine or plan is not continued."""

    key: str
    plan: str


@dataclass(slots=True)
class Record:
    """Measurements of a session; a file keeps them as they come."""

    path: Path | None
    header: Header
    visits: dict[str, list[list[float]]] = field(default_factory=dict)  # point -> times of each visit
    seconds: float = 0.0

    @classmethod
    def open(cls, path: Path | None, header: Header) -> "Record":
        """Continue from the file if it is of the same engine and plan, else start it anew."""
        record = cls(path, header)
        if path is None:
            return record
        earlier = read_visits(path, header)
        for visit in earlier:
            record._count(visit)
        # Rewritten, so that a line cut off by a crash does not swallow the next one.
        lines = [msgspec.json.encode(line) for line in (header, *earlier)]
        write_whole(path, b"\n".join(lines) + b"\n")
        return record

    @property
    def ms(self) -> dict[str, list[float]]:
        """All times of each point."""
        return {point: [ms for visit in visits for ms in visit] for point, visits in self.visits.items()}

    def add(self, visit: Visit) -> None:
        """Keep a visit."""
        self._count(visit)
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(visit) + b"\n")

    def _count(self, visit: Visit) -> None:
        self.visits.setdefault(visit.point, []).append(visit.ms)
        self.seconds += visit.seconds

    def discard(self) -> None:
        """Remove the file once the profile is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def read_visits(path: Path, header: Header) -> list[Visit]:
    """The visits in a session's file up to the first damaged line; none if it is of another session."""
    visits: list[Visit] = []
    try:
        first, *lines = path.read_bytes().splitlines()
        if msgspec.json.decode(first, type=Header) == header:
            for line in lines:
                visits.append(msgspec.json.decode(line, type=Visit))  # noqa: PERF401  keeps those before a bad one
    except (FileNotFoundError, ValueError, msgspec.DecodeError):
        pass
    return visits

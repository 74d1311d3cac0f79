"""What `conserve doctor` reports."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `fix` is the next command where it is not well."""

    name: str
    value: str
    ok: bool = True
    fix: str | None = None

    @classmethod
    def judged(cls, name: str, value: str, fix: str, *, ok: bool) -> "Finding":
        """A finding whose fix counts only where it is not well."""
        return cls(name, value, ok, None if ok else fix)

"""Finding: one line of `conserve doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; `fix` is the next command if it is not well."""

    name: str
    value: str
    ok: bool = True
    fix: str | None = None

    @classmethod
    def judged(cls, name: str, value: str, fix: str, *, ok: bool) -> "Finding":
        """Finding that keeps its fix only if it is not well."""
        return cls(name, value, ok, None if ok else fix)

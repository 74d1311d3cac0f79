"""Mutants that no test kills, each with its reason: tests/survivors/*.toml."""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("tests/survivors")
Key = tuple[str, str, str, str]  # path, function, changed lines before and after, without indentation


def key(path: str, function: str, before: str, after: str) -> Key:
    """Key of a mutant, the same wherever its lines have moved to."""
    return path, function, stripped(before), stripped(after)


def stripped(lines: str) -> str:
    """Lines without their indentation."""
    return "\n".join(line.strip() for line in lines.splitlines()).strip()


def named(folder: Path = FOLDER) -> dict[Key, str]:
    """Reason of each named mutant.

    Raises:
        SystemExit: an entry is incomplete, or a mutant is named twice.
    """
    reasons: dict[Key, str] = {}
    for file in sorted(folder.glob("*.toml")):
        for path, entries in tomllib.loads(file.read_text()).items():
            for entry in entries:
                if missing := {"function", "before", "after", "why"} - entry.keys():
                    raise SystemExit(f"{file}: an entry of {path} has no {', '.join(sorted(missing))}")
                found = key(path, entry["function"], entry["before"], entry["after"])
                if not entry["why"].strip():
                    raise SystemExit(f"{file}: {path}, {entry['function']}: why is empty")
                if found in reasons:
                    raise SystemExit(
                        f"{file}: {path}, {entry['function']}: {entry['after']!r} is named twice"
                    )
                reasons[found] = entry["why"]
    return reasons


def as_toml(survivors: Iterable[tuple[Key, str]]) -> str:
    """Entries for such a file, with what they are instead of a reason."""
    return "\n".join(
        f"[[{quoted(path)}]] # {said}\nfunction = {quoted(function)}\nbefore = {quoted(before)}\n"
        f'after = {quoted(after)}\nwhy = ""\n'
        for (path, function, before, after), said in survivors
    )


def quoted(text: str) -> str:
    """String of TOML, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)

"""Results of the steps in `results.json`, written again with every finding."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conserve.whole import write_whole

FAILED, LEFT_OUT = "failed", "left_out"  # keys of a step that has no result, with the reason


@dataclass(kw_only=True)
class Results:
    """Findings of each step so far; a call that is cut short loses none."""

    folder: Path
    rehearsal: bool  # figures of a rehearsal say nothing about speed
    setting: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / "results.json"

    def note(self, step: str, **found: Any) -> None:
        """Add findings of a step, and write the file."""
        self.steps.setdefault(step, {}).update(found)
        for name, value in found.items():
            print(f"{step} {name}: {json.dumps(value)[:600]}", flush=True)
        self.write()

    def write(self) -> None:
        """Replace the file as a whole: a reader never sees half of it."""
        document = {"rehearsal": self.rehearsal, "setting": self.setting, "steps": self.steps}
        write_whole(self.path, json.dumps(document, indent=1).encode())


def state(found: dict[str, Any]) -> str:
    """One word or sentence on a step's findings."""
    for key in (FAILED, LEFT_OUT):
        if key in found:
            return f"{key.replace('_', ' ')}: {found[key]}"
    return "done" if "took_s" in found else "cut short"

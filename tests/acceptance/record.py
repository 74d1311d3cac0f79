"""Record of a soak: kills by the phase of the work that they hit, and the cost of the rows."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.acceptance.phases import AIM, Phase


@dataclass(slots=True)
class Record:
    """Counts of one store, or of all."""

    kills: Counter[Phase] = field(default_factory=Counter)  # at random moments, by the phase they hit
    aimed: Counter[Phase] = field(default_factory=Counter)
    jobs: int = 0
    processes: int = 0
    rows: int = 0
    attempts: int = 0  # leases of these rows
    answer_tokens: int = 0  # in the results
    resumed_tokens: int = 0  # of these, handed back to the endpoint that had not to generate them again
    generated: int = 0  # by the endpoint, in all processes
    seconds: float = 0.0

    @property
    def redone_tokens(self) -> int:
        """Tokens generated beyond one for each token of an answer: lost in a kill and generated again."""
        return self.generated - self.answer_tokens

    @property
    def all_kills(self) -> int:
        """Kills at random moments, and aimed ones."""
        return self.kills.total() + self.aimed.total()

    @property
    def missed(self) -> list[str]:
        """The phases that no kill hit and some must."""
        return [phase.title for phase in sorted(AIM) if not self.kills[phase] + self.aimed[phase]]

    def add(self, other: "Record") -> None:
        """Count another store's, which ran at the same time or later; `seconds` stay the caller's."""
        self.kills += other.kills
        self.aimed += other.aimed
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def document(self) -> dict[str, object]:
        """The counts for JSON."""
        phases = {phase.title: {"random": self.kills[phase], "aimed": self.aimed[phase]} for phase in Phase}
        counts = {name: getattr(self, name) for name in COUNTS}
        return {
            "kills": self.all_kills,
            "phases": phases,
            **counts,
            "redone_tokens": self.redone_tokens,
            "seconds": round(self.seconds, 1),
        }

    def table(self) -> str:
        """The counts for a reader, as Markdown."""
        lines = ["| phase of the work | kills at random | aimed |", "|---|---|---|"]
        lines += [f"| {phase.title} | {self.kills[phase]:,} | {self.aimed[phase]:,} |" for phase in Phase]
        lines += [f"| all | {self.kills.total():,} | {self.aimed.total():,} |", ""]
        lines.append(
            f"{self.rows:,} rows of {self.jobs:,} jobs, {self.attempts:,} attempts, {self.processes:,} processes; "
            f"answers of {self.answer_tokens:,} tokens, {self.resumed_tokens:,} of them resumed, and "
            f"{self.redone_tokens:,} generated again; {self.seconds:,.0f} s"
        )
        return "\n".join(lines)

    def save(self) -> Path:
        """Keep the counts beside the benchmarks' raw numbers."""
        from tests.benchmarks.report import RAW, environment

        RAW.mkdir(exist_ok=True)
        path = RAW / f"soak-{time.strftime('%Y%m%dT%H%M%S')}.json"
        path.write_text(json.dumps({"environment": environment(), "soak": self.document()}, indent=2))
        return path


COUNTS = ("jobs", "processes", "rows", "attempts", "answer_tokens", "resumed_tokens", "generated")

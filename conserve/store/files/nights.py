"""Files of evaluations' runs.

HOME/evals/runs/<run>/run.json            a run: its plan, its suites, their scores and facts
HOME/evals/runs/<run>/items-00.parquet    items of its first suite, with their answers and scores
HOME/evals/names.json                     names that users gave to runs
HOME/evals/<evaluation>.lock              held and signed by the process that works on a run of this evaluation
HOME/evals/<evaluation>~next.lock         held by the process that waits for it
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from conserve import owners
from conserve.store.files.os_errors import refuse_no_folder

EVALS = "evals"
RECORD = "run.json"


def folder_of(home: Path, run_id: str) -> Path:
    """Folder of one run."""
    return runs_folder(home) / run_id


def runs_folder(home: Path) -> Path:
    """Folder of all runs."""
    return home / EVALS / "runs"


def names_file(home: Path) -> Path:
    """File of the names that users gave to runs."""
    return home / EVALS / "names.json"


def lock_file(home: Path, evaluation: str) -> Path:
    """File that one process at a time holds."""
    return home / EVALS / f"{evaluation}.lock"


def waiting_file(home: Path, evaluation: str) -> Path:
    """File that the one process which waits for the other lock holds; no evaluation has a name with ~."""
    return home / EVALS / f"{evaluation}~next.lock"


def signed_by(home: Path, evaluation: str) -> str:
    """Owner (`conserve.owners`) that holds an evaluation's lock; empty if none does, or if it has yet to sign."""
    try:
        return lock_file(home, evaluation).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def state_of(home: Path, record_state: str, evaluation: str) -> str:
    """State of a run: its record's, but `stopped` where the record says `running` and no process works on it.

    A process of another machine, of which nothing is known, is taken to live until another one signs.
    """
    if record_state != "running":
        return record_state
    owner = signed_by(home, evaluation)
    return record_state if owner and not is_ended(owner) else "stopped"


def is_ended(owner: str) -> bool:
    """True if this was a process of this machine; also for a signature that names none."""
    try:
        return owners.is_dead(owner)
    except ValueError:
        return True


def records(home: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of runs, the oldest first; one that cannot be read is left out."""
    refuse_no_folder(home)
    found = []
    for path in runs_folder(home).glob(f"*/{RECORD}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            found.append((float(record["began_at"]), str(record["id"]), record))
    for _, _, record in sorted(found, key=lambda one: one[:2]):
        yield record


def names(home: Path) -> dict[str, list[str]]:
    """Names that users gave to runs, by run."""
    with suppress(OSError, ValueError, AttributeError):
        found = json.loads(names_file(home).read_bytes()).items()
        return {run_id: [str(name) for name in given] for run_id, given in found if isinstance(given, list)}
    return {}

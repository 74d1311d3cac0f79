"""Names of jobs: the id that is meant by what a user types. Pure."""

from collections.abc import Sequence

from conserve.errors import JobNotFound

FIRST_JOB = 'queue one with: conserve submit data.parquet --prompt "{{ column }}"'


def namesakes(known: Sequence[str], name: str) -> list[str]:
    """Ids of the jobs of this name, which stands before the last hyphen."""
    return [job_id for job_id in known if name and job_id.rpartition("-")[0] == name]


def resolve(
    known: Sequence[str], wanted: str, batches: Sequence[tuple[str, str | None]] = (), *, place: str = ""
) -> str:
    """Full id for an id, "last", the name of one job, or an unambiguous beginning; raises `JobNotFound`.

    `batches` begin with what the user typed, and stand for their jobs. `place` is the store's, if it is known.
    """
    if wanted in known:
        return wanted
    if wanted == "last" and known:
        return known[-1]
    same = namesakes(known, wanted)
    if len(same) == 1:
        return same[0]
    matches = {job_id: job_id for job_id in known if wanted and job_id.startswith(wanted)}
    matches |= {batch_id: job_id or "" for batch_id, job_id in batches}
    if len(matches) > 1 and wanted not in matches:
        raise JobNotFound(f"{wanted!r} could be {', '.join(matches)}; type more of it")
    if matches:
        name = wanted if wanted in matches else next(iter(matches))
        if not matches[name]:
            raise JobNotFound(f"{name} has no job: its input is still checked, or was refused")
        return matches[name]
    if not known:
        where = f" in {place}" if place else ""
        raise JobNotFound(f"there is no job {wanted!r}, for there are no jobs yet{where}; {FIRST_JOB}")
    import difflib

    nearest = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else "run: conserve jobs"
    raise JobNotFound(f"there is no job {wanted!r}; {hint}")

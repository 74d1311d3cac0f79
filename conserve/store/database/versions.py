"""The store's version, apart from the migrations so that reading it imports nothing heavy."""

from conserve.errors import StoreDamaged

LATEST = 14
WITH_CAUSES = 14  # first version that keeps the cause of a job's failure apart from the sentence
WITH_SPANS = 9  # first version in which a lease may hold an interval of rows
WITH_FORECASTS = 8  # first version that keeps harvested tokens, and what becomes of a late job
WITH_DEADLINES = 6  # first version in which a job has a deadline
WITH_BATCHES = 5  # first version in which a job has a batch
WITH_MODELS = 3  # first version in which a job has a model and tags


def too_new(current: int) -> str:
    """Sentence for a store of a later version than this ConServe knows."""
    return (
        f"this store has version {current} and this ConServe knows only up to {LATEST}; "
        "upgrade ConServe, or point CONSERVE_HOME at another folder"
    )


def number(value: object) -> int:
    """Parse a stored version; raises `StoreDamaged` if it is not a number."""
    try:
        return int(str(value))
    except ValueError as error:
        raise StoreDamaged(
            f"the store's version is damaged ({value!r})", step="run: conserve check"
        ) from error

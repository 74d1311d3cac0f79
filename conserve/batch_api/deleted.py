"""Files that clients have just deleted: a list goes on behind one, as where a client deletes what it lists."""

from conserve.store.books.uploads import File

MOST_KEPT = 10_000  # as many as one page has


class DeletedFiles:
    """Places of the files that this process deleted last."""

    def __init__(self) -> None:
        self._seqs: dict[tuple[str, str], int] = {}

    def add(self, file: File) -> None:
        """Keep the place of a file that is deleted now."""
        if len(self._seqs) >= MOST_KEPT:
            del self._seqs[next(iter(self._seqs))]
        self._seqs[file.project, file.id] = file.seq

    def seq(self, project: str, file_id: str) -> int | None:
        """Number of a deleted file of this project; None for any other id."""
        return self._seqs.get((project, file_id))

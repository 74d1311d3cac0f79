"""The pace of a server: offline tokens that one of its places computes a second. Pure: time is a parameter."""

TRUST_S = 1.0  # seconds of a row that weigh as much as the pace of the other servers
HALF_LIFE_S = 20.0  # of a measurement: servers slow down and recover with their live traffic


class Pace:
    """Tokens over the time that rows took, the last ones counted most.

    The pace is that of one row's place. A server with few rows would look slow by its tokens alone and would get
    fewer still; by place it looks fast, since its rows share the engine with fewer others.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._row_s = 0.0  # sum over rows of the seconds that they were in flight
        self._elapsed_s = 0.0
        self._at: float | None = None

    def elapse(self, now: float, rows: int) -> None:
        """Note that so many rows were in flight since the last call. Without rows, measurements only age."""
        since, self._at = self._at, now
        if since is None or now <= since:
            return
        passed_s = now - since
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        self._tokens *= kept
        self._row_s = self._row_s * kept + rows * passed_s
        self._elapsed_s = self._elapsed_s * kept + (passed_s if rows else 0.0)

    def add(self, tokens: float) -> None:
        """Count the tokens that a row took."""
        self._tokens += tokens

    @property
    def of_a_place(self) -> float | None:
        """Tokens a second of one row in flight; None before any was measured."""
        return self._tokens / self._row_s if self._tokens > 0 and self._row_s > 0 else None

    def believed(self, usual: float) -> float:
        """Tokens a second of one row, beginning with the usual pace; old measurements give way to it again.

        So a server that was slow and got no more rows is tried again after a while.
        """
        return (self._tokens + usual * TRUST_S) / (self._row_s + TRUST_S)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all rows in flight; 0 before any was measured."""
        return self._tokens / self._elapsed_s if self._elapsed_s > 0 else 0.0

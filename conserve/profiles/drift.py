"""Drift of measured times from predicted ones, and what the last iterations tell of the next one.

Clocks, heat and neighbours change times slowly: the *lasting* part is an exponentially forgetting mean of
log(measured / predicted), in which a single iteration counts little. Beyond it errors often come in spells, as
where another process takes the core for a tenth of a second, or where the model misjudges the requests of the
moment: the *passing* part is such a mean over a few iterations. Of the passing part the next iteration repeats a
share, the regression of errors on it. The share is 0 where errors are independent, so nothing is lost there.
"""

from math import exp, log

HALF_LIFE = 48  # iterations after which half of a lasting drift is corrected
PASSING = 3  # the same for the passing part
COMPARED = 200  # the same for what the share is taken from
LARGEST_SCALE = 4.0  # bound of the factor; beyond it the profile is wrong, and `out_of_bounds` says so
LARGEST_STEP = log(1.25)  # largest effect of one iteration, in logarithms
UNTOLD = 0.05  # passing part, in logarithms, that is taken to have told nothing before the first iteration


def newest_weight(half_life: float) -> float:
    """Weight of the newest of values whose older ones count half as much after so many."""
    return 1.0 - float(0.5 ** (1 / half_life))


LASTING_WEIGHT, PASSING_WEIGHT, COMPARED_WEIGHT = map(newest_weight, (HALF_LIFE, PASSING, COMPARED))


class Drift:
    """Factor on a model's predictions, from the iterations so far."""

    def __init__(self, log_lasting: float = 0.0) -> None:
        self.log_lasting = log_lasting
        self._log_passing = 0.0
        self._repeated, self._square = 0.0, UNTOLD**2  # forgetting means: error x passing part, its square
        self.factor = exp(log_lasting)

    def restart(self, log_lasting: float) -> None:
        """Follow the drift from another model, of which only the lasting part is known; the share is kept."""
        self.log_lasting, self._log_passing = log_lasting, 0.0
        self.factor = exp(log_lasting)

    @property
    def lasting(self) -> float:
        """The factor without its passing part."""
        return exp(self.log_lasting)

    @property
    def share(self) -> float:
        """Share of the passing part that the next iteration repeats, from 0 to 1."""
        return max(0.0, min(1.0, self._repeated / self._square)) if self._square else 0.0

    def observe(self, ratio: float) -> None:
        """Follow an iteration that took `ratio` times as long as the model says without any drift."""
        off = max(-LARGEST_STEP, min(LARGEST_STEP, log(ratio) - self.log_lasting))
        self._repeated += COMPARED_WEIGHT * (off * self._log_passing - self._repeated)
        self._square += COMPARED_WEIGHT * (self._log_passing**2 - self._square)
        self._log_passing += PASSING_WEIGHT * (off - self._log_passing)
        self.log_lasting = bounded_log(self.log_lasting + LASTING_WEIGHT * off)
        self.factor = exp(bounded_log(self.log_lasting + self.share * self._log_passing))


def bounded_log(log_factor: float) -> float:
    """The logarithm of a factor within the bounds."""
    return max(-log(LARGEST_SCALE), min(log(LARGEST_SCALE), log_factor))

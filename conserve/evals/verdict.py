"""Verdicts on two nights of the same items: worse, no worse, or too few items to tell. Pure.

    pairs of scores ──> evidence (p-values, interval) ──> Benjamini-Hochberg over the suites ──> verdict

Two hypotheses are tested for each suite, since not finding a decline does not show that there is none:

- *no decline*: rejected, the suite is worse, unless the decline is certainly smaller than what counts;
- *a decline of what counts, or more*: rejected, the suite is no worse.

With neither rejected nothing can be told, and the verdict names the number of items that could tell.
"""

from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.stats import false_discovery_control

from conserve.evals.paired import Evidence, Pairs, Standard, evidence
from conserve.units import count

Name = TypeVar("Name", bound=Hashable)  # of a suite, or of a metric of one


class Verdict(StrEnum):
    """Verdict on a suite, or on a night."""

    WORSE = "worse"
    """A decline beyond chance, and perhaps as large as what counts."""
    NO_WORSE = "no worse"
    """No decline as large as what counts."""
    CANNOT_TELL = "cannot tell"
    """Both may be, with so few items."""


WORST_FIRST = (Verdict.WORSE, Verdict.CANNOT_TELL, Verdict.NO_WORSE)


class SuiteVerdict(NamedTuple):
    """Verdict on a suite with its evidence; `p_decline` is adjusted for the number of suites.

    `doubt` says why nothing can be told whatever the number of items.
    """

    verdict: Verdict
    evidence: Evidence
    p_decline: float
    doubt: str = ""

    @property
    def sentence(self) -> str:
        """Verdict in words."""
        seen = self.evidence
        if self.verdict is Verdict.CANNOT_TELL:
            if self.doubt:
                return f"cannot tell: {self.doubt}"
            if seen.needed is None:
                return "cannot tell, and no number of items of these sources would"
            return f"cannot tell: n = {seen.needed:,} needed for this effect"
        within = f"{seen.difference:+.3g} ({seen.low:+.3g} to {seen.high:+.3g})"
        return f"{self.verdict}: {within}, {seen.lost:,} items fell and {seen.gained:,} rose"


def judge(
    suites: Mapping[Name, Pairs],
    standards: Mapping[Name, Standard],
    rng: np.random.Generator,
    *,
    families: int = 1,
) -> dict[Name, SuiteVerdict]:
    """Judge the suites of a night together: alarms without a decline have one chance for all of them.

    They share it with the other `families` of tests that may raise an alarm. The all-clear of each suite keeps a
    chance of its own. `rng` draws the bootstraps.
    """
    if not suites:
        return {}
    among = len(suites) * families
    found = {name: evidence(pairs, standards[name], rng, among=among) for name, pairs in suites.items()}
    each = false_discovery_control([seen.p_decline for seen in found.values()], method="bh")
    adjusted = np.minimum(1.0, each * families)
    return {
        name: SuiteVerdict(decide(seen, float(p), standards[name]), seen, float(p))
        for (name, seen), p in zip(found.items(), adjusted, strict=True)
    }


def decide(seen: Evidence, p_decline: float, standard: Standard) -> Verdict:
    """Verdict of a suite's evidence; `p_decline` is adjusted for the number of suites."""
    if seen.p_effect <= standard.alpha:
        return Verdict.NO_WORSE
    return Verdict.WORSE if p_decline <= standard.alpha else Verdict.CANNOT_TELL


def blind(metric: str) -> str:
    """Sentence about a suite that has the lowest score already, as where it compares with the wrong column."""
    return f"every item scores 0 by {metric}: this suite can find no decline"


def scoreless(suite: str, metric: str, items: int) -> str:
    """Sentence about items without the score that they had before, so many that the others tell nothing."""
    # An item has a row for each metric that scored it, so that one without this metric may have others.
    its = "metric = '" + metric.replace("'", "''") + "'"
    select = (
        f"select run_id, item, epoch, answer, error from eval_items where suite = '{suite}' and item in "
        f"(select item from eval_items where {its}) group by all having count(*) filter ({its}) = 0"
    )
    return f'{count(items, "item")} without the {metric} of before; look with: conserve sql "{select}"'


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Worst of these verdicts, of which there is one at least."""
    return min(verdicts, key=WORST_FIRST.index)

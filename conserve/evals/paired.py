"""Evidence from the paired scores of two nights: p-values, an interval, and the items that are needed. Pure.

Right or wrong answers of independent items have exact tests: McNemar's (Psychometrika 12, 1947), and Tango's score
test for differences of paired proportions (Statistics in Medicine 17, 1998). All other scores have a paired
bootstrap of clusters, studentised by clustered standard errors (Cameron, Gelbach and Miller, Review of Economics
and Statistics 90, 2008; Miller, arXiv 2411.00640, for evaluations). Where hardly any cluster differs, tests of the
number and the signs of the differences are exact.

No test clears a fall that the items may have missed: n show none of a share with a chance of (1 - share) ** n.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, floor, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta, binom, binomtest, norm, t

from conserve.errors import UsageError
from conserve.evals.bootstrap import Drawn, Floats, Student, clustered_error, sorted_t, source_numbers

MOST_DRAWN = 10_000  # clusters; of more the mean is normal enough
FEW = 8  # clusters that differ; of fewer most resamples have hardly any, and a bootstrap says nothing
MOST_FALL = 1 - 1e-9  # share of items: of right or wrong answers no mean falls by more
MOST_ITEMS = 10_000_000  # an answer beyond that is "no number of items"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standard:
    """Measure of worse: a fall of the mean score by `effect`.

    `confidence` bounds both errors: an alarm without a decline, and an all-clear in spite of such a fall. `power`
    is the chance that a number of items that is named as needed finds such a fall.
    """

    effect: float
    confidence: float = 0.95
    power: float = 0.8

    def __post_init__(self) -> None:
        if not self.effect > 0:
            raise UsageError(f"the effect that counts as worse must be above 0, not {self.effect:g}")
        for name in ("confidence", "power"):
            if not 0.5 < getattr(self, name) < 1:
                raise UsageError(f"{name} lies between 0.5 and 1, as 0.95, not {getattr(self, name):g}")

    @property
    def alpha(self) -> float:
        """Chance of either error."""
        return 1 - self.confidence


@dataclass(frozen=True, slots=True)
class Pairs:
    """Scores of the items that both nights have, and the cluster of each: items of one source, or itself."""

    before: Floats  # (n,)
    after: Floats  # (n,)
    clusters: NDArray[np.int64]  # (n,), numbered from 0

    @classmethod
    def of(
        cls,
        before: Mapping[Hashable, float],
        after: Mapping[Hashable, float],
        sources: Mapping[Hashable, Hashable] | None = None,
    ) -> "Pairs":
        """Pair scores by item; `sources` name what items share. Raises `UsageError` if no item is in both."""
        items = [item for item in before if item in after]
        if not items:
            raise UsageError("the two nights have no item in common; compare runs of the same suite and seed")
        named = [item if sources is None else sources.get(item, (item,)) for item in items]
        return cls(
            np.array([before[item] for item in items], float),
            np.array([after[item] for item in items], float),
            source_numbers(named),
        )

    @property
    def differences(self) -> Floats:
        """Scores after less those before, by item."""
        return self.after - self.before

    @property
    def are_answers(self) -> bool:
        """True if every item is right (1) or wrong (0), and stands for itself: McNemar's table."""
        scores = np.concatenate([self.before, self.after])
        return bool(np.isin(scores, (0.0, 1.0)).all()) and len(set(self.clusters.tolist())) == len(
            self.clusters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence on one suite. `difference` is of mean scores, after less before, with its interval."""

    items: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    lost: int  # items whose score fell
    gained: int  # items whose score rose
    p_decline: float  # of this decline, or a larger one, if there were none
    p_effect: float  # of this difference, or a better one, if the fall were what counts
    needed: int | None  # items that could tell; None if no number could
    test: str  # "McNemar", "bootstrap", "exact" or "t"

    @property
    def negated(self) -> "Evidence":
        """Evidence on the negated scores."""
        return replace(
            self,
            before=0.0 - self.before,
            after=0.0 - self.after,
            difference=0.0 - self.difference,
            low=0.0 - self.high,
            high=0.0 - self.low,
            lost=self.gained,
            gained=self.lost,
        )


def evidence(pairs: Pairs, standard: Standard, rng: np.random.Generator, *, among: int = 1) -> Evidence:
    """Evidence of one suite `among` several: exact for answers of independent items, else by bootstrap."""
    if not np.isfinite(pairs.differences).all():
        raise UsageError("a score is no number; leave out items without a score, or score them 0")
    seen = of_answers(pairs, standard, among) if pairs.are_answers else of_scores(pairs, standard, rng, among)
    return seen if seen.test == "exact" else replace(seen, needed=to_tell(seen, standard, among))


def of_answers(pairs: Pairs, standard: Standard, among: int) -> Evidence:
    """Evidence of answers that are right or wrong: McNemar's exact test, Tango's for the effect."""
    n, difference = len(pairs.before), pairs.differences
    lost, gained = int((difference < 0).sum()), int((difference > 0).sum())
    flips, effect = lost + gained, min(standard.effect, MOST_FALL)
    return summary(
        pairs,
        low=-tango_bound(lost, gained, n, standard.alpha),
        high=tango_bound(gained, lost, n, standard.alpha),
        p_decline=float(binomtest(lost, flips, alternative="greater").pvalue) if flips else 1.0,
        p_effect=max(unseen(effect, n), float(norm.cdf(tango(lost, gained, n, effect)))),
        needed=max(needed_answers(flips / n, standard, among), needed_to_see(effect, standard.alpha)),
        test="McNemar",
    )


def summary(
    pairs: Pairs, *, low: float, high: float, p_decline: float, p_effect: float, needed: float, test: str
) -> Evidence:
    """Evidence of these tests on these pairs."""
    difference = pairs.differences
    return Evidence(
        items=len(difference),
        before=float(pairs.before.mean()),
        after=float(pairs.after.mean()),
        difference=float(difference.mean()),
        low=low,
        high=high,
        lost=int((difference < 0).sum()),
        gained=int((difference > 0).sum()),
        p_decline=p_decline,
        p_effect=p_effect,
        needed=ceil(needed) if needed <= MOST_ITEMS else None,
        test=test,
    )


def tango(lost: int, gained: int, n: int, fall: float) -> float:
    """Tango's score statistic for a fall of this share of items: normal if the fall is that large, else lower."""
    a = 2 * n
    b = (2 * n - lost + gained) * fall - lost - gained
    c = -gained * fall * (1 - fall)
    gaining = (sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # share that gains, if the fall is that large
    variance = n * (2 * gaining + fall * (1 - fall))
    return (lost - gained - n * fall) / sqrt(variance) if variance > 0 else 0.0


def tango_bound(lost: int, gained: int, n: int, alpha: float) -> float:
    """Largest fall, as a share of items, that Tango's test does not reject at this level."""
    seen, most, least = (lost - gained) / n, MOST_FALL, float(norm.ppf(alpha))

    def beyond(fall: float) -> float:
        return tango(lost, gained, n, fall) - least

    return float(brentq(beyond, seen, most)) if seen < most and beyond(most) < 0 else 1.0


def needed_answers(flips: float, standard: Standard, among: int) -> float:
    """Number of independent items with which McNemar's test finds the effect, if this share of items flips."""
    effect = min(standard.effect, MOST_FALL)
    flips = max(flips, effect)
    alpha = standard.alpha / among
    z, z_power = float(norm.isf(alpha)), float(norm.ppf(standard.power))
    normal = ((z * sqrt(flips) + z_power * sqrt(max(0.0, flips - effect**2))) / effect) ** 2
    if normal > MOST_ITEMS:
        return inf
    few, enough = 0, max(1, ceil(normal / 2))
    while mcnemar_power(enough, flips, effect, alpha) < standard.power:
        few, enough = enough, 2 * enough
    while enough - few > max(1, enough // 500):
        middle = (few + enough) // 2
        found = mcnemar_power(middle, flips, effect, alpha) >= standard.power
        few, enough = (few, middle) if found else (middle, enough)
    return enough


def mcnemar_power(n: int, flips: float, effect: float, alpha: float) -> float:
    """Chance that McNemar's exact test finds a fall by `effect` in n items, of which a share flips."""
    spread = 6 * sqrt(n * flips * (1 - flips)) + 1
    counts = np.arange(max(0, int(n * flips - spread)), min(n, int(n * flips + spread)) + 1)
    least_lost = binom.isf(alpha, counts, 0.5)  # more than these are significant
    finds = binom.sf(least_lost, counts, (flips + effect) / (2 * flips))
    return float((binom.pmf(counts, n, flips) * finds).sum())


def of_scores(pairs: Pairs, standard: Standard, rng: np.random.Generator, among: int) -> Evidence:
    """Evidence of any scores, by a bootstrap of clusters, or by Student's t where there are very many."""
    sums = np.bincount(pairs.clusters, pairs.differences).astype(np.float64)
    sizes = np.bincount(pairs.clusters).astype(np.float64)
    clusters, n = len(sums), len(pairs.before)
    mean = float(sums.sum() / n)
    error = float(clustered_error(sums, sizes))
    if clusters < 2:
        return summary(pairs, low=-inf, high=inf, p_decline=1.0, p_effect=1.0, needed=inf, test="t")
    if error == 0:
        return of_equal_differences(pairs, standard, mean, sizes)
    if np.count_nonzero(sums) < FEW:
        needed = needed_scores(n, clusters, error, standard, among)
        return of_few_differences(pairs, standard, sums, sizes, needed)
    alpha, share = standard.alpha, collapsing_share(pairs, standard, sizes)
    found: Student | Drawn
    if clusters > MOST_DRAWN:
        found = Student(clusters - 1)
    else:
        found = Drawn(sorted_t(sums, sizes, rng))
    return summary(
        pairs,
        low=mean - found.quantile(1 - alpha) * error,
        high=mean - found.quantile(alpha) * error,
        p_decline=found.at_most(mean / error),
        p_effect=max(unseen(share, clusters), 1 - found.below((mean + standard.effect) / error)),
        needed=max(
            needed_scores(n, clusters, error, standard, among), needed_to_see(share, alpha) * n / clusters
        ),
        test=found.test,
    )


def needed_scores(n: int, clusters: int, error: float, standard: Standard, among: int) -> float:
    """Number of items with which the effect is found, if their clusters are like these; `error` is of n items."""
    z, z_power = norm.isf(standard.alpha / among), norm.ppf(standard.power)
    needed = n * ((z + z_power) * error / standard.effect) ** 2
    freedom = max(1.0, needed * clusters / n - 1)
    factor = t.isf(standard.alpha / among, freedom) + t.ppf(standard.power, freedom)
    return float(n * (factor * error / standard.effect) ** 2)


def of_equal_differences(pairs: Pairs, standard: Standard, mean: float, sizes: Floats) -> Evidence:
    """Evidence where all clusters differ alike, mostly not at all: the chance to have missed the others."""
    missed = unseen(share := falling_share(pairs, standard, sizes), len(sizes))
    return summary(
        pairs,
        low=mean,
        high=mean,
        p_decline=missed if mean < 0 else 1.0,
        p_effect=missed if mean > -standard.effect else 1.0,
        needed=needed_to_see(share, standard.alpha) * len(pairs.before) / len(sizes),
        test="t",
    )


def falling_share(pairs: Pairs, standard: Standard, sizes: Floats) -> float:
    """Least share of clusters that fall where the mean falls by what counts, a share of the scores' range."""
    return min(0.999, standard.effect / largest_fall(pairs, sizes))


def collapsing_share(pairs: Pairs, standard: Standard, sizes: Floats) -> float:
    """Least share of clusters whose grades fall to the lowest where the mean falls by what counts.

    Of grades from 0 to 1, or of negated ones; of scores without a lowest one all, so that each cluster shows it.
    """
    scores = np.concatenate([pairs.before, pairs.after])
    lowest = floor(scores.min())
    if scores.max() > lowest + 1 or lowest not in (0, -1):
        return 1.0
    reach = float(pairs.before.mean() - lowest) * float(sizes.max() / sizes.mean())
    return min(1.0, standard.effect / reach) if reach > 0 else 1.0


def unseen(share: float, clusters: int) -> float:
    """Chance that so many clusters show none of those that fall, which are this share of all."""
    return (1 - share) ** clusters


def needed_to_see(share: float, alpha: float) -> float:
    """Number of clusters that show one of those that fall, but for this chance."""
    return log(alpha) / log(1 - share) if share < 1 else 1.0


def of_few_differences(
    pairs: Pairs, standard: Standard, sums: Floats, sizes: Floats, needed: float
) -> Evidence:
    """Exact evidence where hardly any cluster differs: by their number, and by the signs of their differences."""
    clusters, alpha = len(sums), standard.alpha
    differing = sums[sums != 0]
    lost, gained = int((differing < 0).sum()), int((differing > 0).sum())
    reach, share = largest_fall(pairs, sizes), falling_share(pairs, standard, sizes)
    signs = np.array(list(product((-1.0, 1.0), repeat=len(differing)))) @ np.abs(differing)
    return summary(
        pairs,
        low=-reach * most_of(lost, clusters, alpha),
        high=reach * most_of(gained, clusters, alpha),
        p_decline=float((signs <= differing.sum() + 1e-12).mean()),
        p_effect=float(binom.cdf(lost, clusters, share)),
        needed=max(needed, needed_to_clear(lost / clusters, share, alpha) * len(pairs.before) / clusters),
        test="exact",
    )


def needed_to_clear(falling: float, share: float, alpha: float) -> float:
    """Number of clusters of which so many would have to fall, if this share falls, that the others clear them."""
    count, found = 1, False
    while not found and count <= MOST_ITEMS:
        count = ceil(1.1 * count)
        found = float(binom.cdf(ceil(falling * count), count, share)) <= alpha
    return count if found else inf


def most_of(count: int, clusters: int, alpha: float) -> float:
    """Largest share of clusters of which so few are no surprise (Clopper and Pearson)."""
    return float(beta.isf(alpha, count + 1, clusters - count)) if count < clusters else 1.0


def largest_fall(pairs: Pairs, sizes: Floats) -> float:
    """Fall of the mean if all clusters fall as the largest one may: by the scores' range, or by 1."""
    scores = np.concatenate([pairs.before, pairs.after])
    return max(1.0, float(np.ptp(scores))) * float(sizes.max() / sizes.mean())


def to_tell(seen: Evidence, standard: Standard, among: int) -> int | None:
    """Number of items that could tell: by the standard, and at the difference that was seen."""
    strength = norm.isf(seen.p_decline), norm.isf(seen.p_effect)
    wanted = norm.isf(standard.alpha / among), norm.isf(standard.alpha)
    missing = min((want / have for want, have in zip(wanted, strength, strict=True) if have > 0), default=inf)
    more = seen.items * missing**2 if 1 < missing < inf else 0
    most = max(inf if seen.needed is None else seen.needed, more)
    return ceil(most) if most <= MOST_ITEMS else None

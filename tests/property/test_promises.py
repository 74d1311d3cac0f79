"""Whatever latencies come within the bounds that the accounts hand out, every promise is kept."""

from collections.abc import Sequence
from itertools import accumulate, cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.engine.runtime.accountant import SAVED_OF_LARGEST, Account
from conserve.engine.runtime.credit import DEBT, MARGIN, OVERDRAWN, SAVED
from tests.reach import reached

P50_MS, P90_MS, P99_MS, MEAN_MS = 40.0, 100.0, 150.0, 60.0
MOST = 8  # requests at once

LENGTH = 300  # iterations, for which a drawn pattern is repeated

# An iteration: requests that wait for a token, those of them that get none, and the time as a share of the bound.
ITERATIONS = st.lists(
    st.tuples(st.integers(1, MOST), st.integers(0, 3), st.sampled_from([0.2, 0.9, 1.0, 1.0, 1.0])),
    min_size=1,
    max_size=20,
).map(lambda pattern: [*islice(cycle(pattern), LENGTH)])


def played(account: Account, iterations: Sequence[tuple[int, int, float]]) -> list[tuple[float, int]]:
    """Latencies within the bounds handed out, and how many requests had each."""
    latencies = []
    for waiting, fewer, share in iterations:
        ms, count = account.bound_ms(waiting) * share, max(1, waiting - fewer)
        account.note(ms, count)
        latencies.append((ms, count))
    return latencies


def runs(values: Sequence[float], counts: Sequence[int], *, least: float) -> list[tuple[float, int]]:
    """Sum and number of the values of each window that ends now, with `least` values or more."""
    sums = [
        *accumulate(value * count for value, count in zip(reversed(values), reversed(counts), strict=True))
    ]
    return [pair for pair in zip(sums, accumulate(reversed(counts)), strict=True) if pair[1] >= least]


@pytest.mark.parametrize(("rank", "bound_ms"), [(0.5, P50_MS), (0.9, P90_MS)])
@given(iterations=ITERATIONS)
def test_a_quantile_is_kept_in_every_window(
    rank: float, bound_ms: float, iterations: Sequence[tuple[int, int, float]]
) -> None:
    latencies = played(Account({"p50": P50_MS, "p90": P90_MS, "p99": P99_MS}), iterations)
    late = [float(ms > bound_ms) for ms, _ in latencies]
    earned = (1 - rank) * (1 - MARGIN)
    least = (
        SAVED * MOST * (1 - earned) / ((1 - rank) * MARGIN)
    )  # the credit saved before the window is within it
    for late_ones, count in runs(late, [count for _, count in latencies], least=least):
        assert late_ones <= (1 - rank) * count
    if rank == 0.5 and reached("latencies exceed the bound of the median", any(late)):
        assert sum(late) > LENGTH / 10


@given(iterations=ITERATIONS)
def test_a_mean_is_kept_in_every_window(iterations: Sequence[tuple[int, int, float]]) -> None:
    latencies = played(Account({"mean": MEAN_MS}), iterations)
    least = SAVED * MOST * (1 - MARGIN) / MARGIN
    for sum_ms, count in runs([ms for ms, _ in latencies], [count for _, count in latencies], least=least):
        assert sum_ms <= MEAN_MS * count * (1 + 1e-9)
    if reached("what short ones leave is used", max(ms for ms, _ in latencies) > MEAN_MS):
        assert max(ms for ms, _ in latencies) <= (1 + SAVED * MOST) * MEAN_MS


@given(iterations=ITERATIONS)
def test_no_bound_exceeds_the_largest_promise(iterations: Sequence[tuple[int, int, float]]) -> None:
    account = Account({"p50": P50_MS, "p99": P99_MS, "mean": MEAN_MS})
    assert all(ms <= P99_MS for ms, _ in played(account, iterations))


def test_a_p99_alone_is_the_bound_of_every_iteration() -> None:
    account = Account({"p99": P99_MS})
    for ms in (1.0, 1e4, 1.0):
        assert account.bound_ms(3) == P99_MS
        account.note(ms, 3)


def test_about_half_of_the_gaps_may_be_long() -> None:
    account, long = Account({"p50": P50_MS, "p99": P99_MS}), 0
    for _ in range(1000):
        long += account.bound_ms(4) == P99_MS
        account.note(account.bound_ms(4), 4)
    assert long == pytest.approx(450, abs=5)


def test_short_gaps_of_an_hour_do_not_pay_for_a_minute_of_long_ones() -> None:
    account = Account({"p50": P50_MS, "p99": P99_MS})
    for _ in range(10_000):
        account.note(10.0, 4)
    granted = 0
    while account.bound_ms(4) == P99_MS:
        account.note(P99_MS, 4)
        granted += 1
    assert granted <= SAVED


def test_a_debt_is_paid_back_in_bounded_time() -> None:
    account, iterations = Account({"p50": P50_MS, "p99": P99_MS}), 0
    for _ in range(10_000):
        account.note(1000.0, 4)  # live traffic itself was late
    while account.bound_ms(4) == P50_MS:
        account.note(P50_MS, 4)
        iterations += 1
    assert DEBT < iterations < 2 * DEBT


@given(iterations=ITERATIONS, late=st.integers(0, 300))
def test_a_largest_promise_is_broken_while_many_more_latencies_are_late_than_it_allows(
    iterations: Sequence[tuple[int, int, float]], late: int
) -> None:
    account = Account({"p50": P50_MS, "p99": P99_MS})
    played(account, iterations)
    assert not account.broken, "no iteration was planned beyond it"
    for _ in range(late):
        account.note(P99_MS + 1, 1)
    assert not account.broken or late > OVERDRAWN
    if reached("more are late than may be", late > (SAVED_OF_LARGEST + OVERDRAWN) * MOST):
        assert account.broken
    kept = 0
    while account.broken:
        account.note(P99_MS, MOST)
        kept += MOST
    assert kept <= late / (0.01 * (1 - MARGIN)) + MOST


def test_the_largest_quantile_at_the_largest_bound_decides() -> None:
    for named in ({"p50": P99_MS, "p99": P99_MS}, {"p99": P99_MS}, {"p50": P99_MS}):
        account = Account(named)
        for _ in range(5):
            account.note(P99_MS + 1)
        for _ in range(60):
            account.note(1.0)
        assert account.broken == ("p99" in named)
        for _ in range(200):
            account.note(1.0)
        assert not account.broken
    assert not Account({"mean": MEAN_MS}).broken
    assert not Account({}).broken


def test_an_hour_of_short_gaps_pays_for_ten_iterations_of_late_ones_and_three_may_be_owed() -> None:
    account, late = Account({"p99": P99_MS}), 0
    for _ in range(10_000):
        account.note(10.0, 1)
    while not account.broken:
        account.note(P99_MS + 1, 1)
        late += 1
    assert late == 14


def test_a_latency_at_its_bound_is_not_late() -> None:
    account = Account({"p99": P99_MS})
    for _ in range(100):
        account.note(P99_MS, 4)
    assert not account.broken


def test_what_short_latencies_leave_of_a_mean_is_for_long_ones() -> None:
    account = Account({"mean": MEAN_MS})
    assert account.bound_ms(1) == pytest.approx(54), "a tenth is never spent"
    account.note(24.0)
    assert [account.bound_ms(2), account.bound_ms(1)] == pytest.approx([54 + 15, 54 + 30])
    account.note(84.0)
    assert account.bound_ms(1) == pytest.approx(54)
    for _ in range(100):
        account.note(0.0, 4)
    assert account.bound_ms(4) == pytest.approx(54 + 2 * 54), "two iterations' worth is saved"

"""The forecast: more work ends later, the order of the harvester is kept to, and a steady rate is met."""

from itertools import pairwise
from math import exp, inf, log
from random import Random
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from conserve.jobs.deadlines.backlog import backlog
from conserve.jobs.deadlines.forecast import (
    Forecast,
    Level,
    finite,
    forecast,
    forecasts,
    with_others,
    without_others,
)
from conserve.jobs.deadlines.queue import queued
from conserve.jobs.deadlines.rate import DAY, HORIZON_S, Course, Rates
from conserve.jobs.deadlines.work import (
    UNSEEN_TOKENS,
    QueuedJob,
    RemainingWork,
    computed_tokens,
    usual_row_tokens,
    work_of,
)
from conserve.store.books.slots import SLOT_S
from conserve.store.books.states import JobState, OnLate
from tests.conftest import examples
from tests.reach import reached

NOW = 20 * 86_400.0 + 12_345.0
FIRST = int(NOW // SLOT_S)


def steady(tokens_per_s: float = 100.0, days: int = 5) -> Rates:
    """Equal rates in every slot of the days before."""
    return Rates({FIRST - back: tokens_per_s for back in range(1, days * DAY + 1)})


def job(name: str = "a", rows: int = 1000, seen: int = 10_000, **named: object) -> QueuedJob:
    """A job whose rows take 100 tokens each."""
    work = RemainingWork(rows_left=rows, row_tokens=100.0, rows_seen=seen)
    return QueuedJob(**{"id": name, "seq": ord(name[0]), "work": work, **named})


def test_a_steady_rate_is_met() -> None:
    found = forecasts([job()], steady(), now=NOW)["a"]
    assert finite(found.done_50) - NOW == pytest.approx(1000.0, rel=0.05)
    assert finite(found.done_50) < finite(found.done_90) < NOW + 1300.0


def test_hours_without_harvest_are_waited_for() -> None:
    """Nothing is harvested from 6 to 18 UTC; two hours of work, begun at half past five, end in the evening."""
    by_day = {slot: 0.0 if 24 <= slot % DAY < 72 else 100.0 for slot in range(FIRST - 5 * DAY, FIRST)}
    now = 20 * 86_400.0 + 5.5 * 3600
    rates = Rates({slot: rate for slot, rate in by_day.items() if (slot + 1) * SLOT_S <= now})
    found = forecasts([job(rows=7200)], rates, now=now)["a"]
    assert 18.5 * 3600 < finite(found.done_50) - 20 * 86_400.0 < 21 * 3600


def test_nothing_is_forecast_before_anything_was_harvested() -> None:
    assert forecasts([job()], Rates({}), now=NOW) == {}
    assert Rates.of([(5, 100.0, 2.0)]).mean(NOW) is None
    assert usual_row_tokens([]) == UNSEEN_TOKENS


def test_a_course_tells_tokens_by_a_moment_and_the_moment_of_tokens() -> None:
    """Beyond two weeks it tells no more than by their end."""
    course = Course(steady(), now=NOW, seed=1)
    assert (course.by(NOW), course.by(NOW - 5.0), course.when(0.0)) == (0.0, 0.0, NOW)
    for hours in (0.1, 1, 30):
        assert course.when(course.by(NOW + hours * 3600)) == pytest.approx(NOW + hours * 3600)
    by_the_end = course.by(NOW + 2 * HORIZON_S)
    assert course.by(NOW + HORIZON_S) < by_the_end == course.by(NOW + 3 * HORIZON_S)
    assert course.when(2 * by_the_end) == inf


def test_a_course_goes_as_one_earlier_day_went_and_not_as_their_mean() -> None:
    """The present rate's difference to it has faded within some hours."""
    by_slot = {FIRST - back: 100.0 if back <= DAY else 200.0 for back in range(1, 2 * DAY + 1)}
    found = set()
    for seed in range(12):
        course = Course(Rates(by_slot), now=float(FIRST * SLOT_S), seed=seed)
        begun, later = (FIRST + 26) * SLOT_S, (FIRST + 32) * SLOT_S
        rate = (course.by(later) - course.by(begun)) / (later - begun) / course._factor
        assert min(abs(rate - 100.0), abs(rate - 200.0)) < 3.0
        found.add(round(rate, -2))
    assert found == {100.0, 200.0}


def test_the_present_rate_is_the_mean_of_the_last_hour_as_far_as_rows_ran() -> None:
    rates = Rates({100: 10.0, 102: 30.0, 103: 50.0, 90: 7.0})
    assert rates.recent(104) == 30.0
    assert rates.recent(105) == 40.0
    assert rates.recent(110) is None
    assert rates.recent(114, back=10) == 30.0
    assert rates.usual(100 + DAY) == 10.0
    assert rates.usual(50) == sum(rates.by_slot.values()) / 4


@pytest.mark.parametrize(
    ("days", "weight"), [(1, 1.0), (7, 3.0), (6 * 7, 3.0), (69, 1.0), (70, 3.0), (71, None)]
)
def test_the_same_weekday_counts_more_and_days_of_long_ago_not_at_all(
    days: int, weight: float | None
) -> None:
    """Eight weeks are kept, and a forecast looks two weeks ahead."""
    slot = 100 * DAY + 5
    found = Rates({slot - days * DAY: 1.0}).days_before(slot)
    assert found == ([(days * DAY, weight)] if weight else [])


def test_a_job_beyond_the_horizon_has_no_moment() -> None:
    found = forecasts([job(rows=10**9, deadline=NOW + 60.0)], steady(), now=NOW)["a"]
    assert (found.done_50, found.done_90, found.in_time) == (None, None, 0.0)
    assert found.is_late


def test_damaged_figures_are_left_out() -> None:
    """A slot is busy for its length at most, and holds a number of tokens that an engine could compute."""
    damaged = [
        (FIRST, float("nan"), 900.0),
        (FIRST, 1.0, float("inf")),
        (FIRST, -5.0, 900.0),
        (FIRST, 1e300, 900.0),
    ]
    assert Rates.of(damaged).by_slot == {}
    far = Rates.of([(-(10**18), 9000.0, 900.0), (10**18, 9000.0, 900.0)])
    assert finite(forecasts([job()], far, now=NOW)["a"].done_50) > NOW


def test_slots_in_which_hardly_a_row_ran_or_that_cannot_be_true_are_left_out() -> None:
    seen = [(1, 1500.0, 15.0), (2, 1e3, 14.9), (3, 0.0, 901.0), (4, 1.0, 901.1), (5, 1e12, 900.0)]
    assert Rates.of(seen).by_slot == {1: 100.0, 3: 0.0}


def test_a_usual_rate_counts_the_same_weekday_three_times_and_the_mean_is_of_a_whole_day() -> None:
    slot = 100 * DAY
    rates = Rates({slot - DAY: 10.0, slot - 7 * DAY: 30.0})
    assert rates.usual(slot) == rates.usual(slot) == 25.0
    assert rates.mean(float(slot * SLOT_S)) == pytest.approx((25.0 + 95 * 20.0) / 96)
    assert rates.mean(float((slot + 1) * SLOT_S - 1)) == pytest.approx((25.0 + 95 * 20.0) / 96)


def test_a_course_begins_at_the_present_rate_which_fades_to_that_of_the_earlier_day() -> None:
    """The rate is 100 all day before, and 40 in the last hour: its distance falls to 1/e within six quarters."""
    by_slot = {FIRST - back: 40.0 if back < 4 else 100.0 for back in range(1, DAY + 4)}
    now = float(FIRST * SLOT_S)
    course = Course(Rates(by_slot), now=now, seed=3)
    done = [course.by(now + quarters * SLOT_S) for quarters in range(16)]
    rates = [(later - one) / SLOT_S / course._factor for one, later in pairwise(done)]
    assert rates == pytest.approx([100.0 - 60.0 * exp(-step / 6) for step in range(15)])


def test_a_course_is_never_much_faster_than_what_was_seen() -> None:
    now = float(FIRST * SLOT_S)
    fastest = max(Course(steady(days=1), now=now, seed=seed).by(now + SLOT_S) / SLOT_S for seed in range(100))
    assert fastest == pytest.approx(110.0)


def test_a_day_that_was_seen_says_less_than_many() -> None:
    """Courses differ by 10.4 % after one day, by 3.3 % after sixty."""
    for days, spread in ((1, 0.104), (60, 0.0327)):
        factors = [log(Course(steady(days=days), now=NOW, seed=seed)._factor) for seed in range(300)]
        assert pstdev(factors) == pytest.approx(spread, rel=0.15)
        assert fmean(factors) == pytest.approx(0.0, abs=0.2 * spread)


@pytest.mark.parametrize(
    ("left", "seen", "spread"),
    [(10**6, 0, 0.5), (1, 10**6, 0.5), (10**6, 4, 0.3), (36, 10**8, 0.1), (36, 36, 0.1414)],
)
def test_tokens_of_a_job_are_known_the_better_the_more_rows_were_answered_and_are_left(
    left: int, seen: int, spread: float
) -> None:
    work, dice = RemainingWork(rows_left=left, row_tokens=10.0, rows_seen=seen), Random(1)
    none = RemainingWork(rows_left=0, row_tokens=10.0, rows_seen=seen)
    level = Level.of([QueuedJob(id=str(n), seq=n, work=each) for n, each in enumerate((work, none))])
    both = [level.drawn_tokens(dice)[1] for _ in range(2000)]
    drawn = [tokens / work.tokens for tokens, _ in both]
    assert pstdev(map(log, drawn)) == pytest.approx(spread, rel=0.05)
    assert fmean(drawn) == pytest.approx(1.0, rel=0.05)
    assert {tokens for _, tokens in both} == {0.0}


def test_a_forecast_is_of_half_and_of_nine_tenths_of_the_courses() -> None:
    found = forecast([float(n) for n in range(20)], deadline=14.0)
    assert (found.done_50, found.done_90, found.in_time) == (10.0, 18.0, 0.75)
    assert not found.is_late
    assert not forecast([1.0, 2.0], deadline=1.0).is_late
    assert forecast([1.0, 2.0, 3.0], deadline=1.0).is_late
    assert forecast([1.0], deadline=None) == Forecast(done_50=1.0, done_90=1.0, in_time=None)
    assert not forecast([1.0], deadline=None).is_late


def test_work_is_of_tokens_that_are_computed_and_a_row_takes_one_at_least() -> None:
    done = SimpleNamespace(succeeded=4, prompt_tokens=100, cached_tokens=60, completion_tokens=40)
    cached = SimpleNamespace(succeeded=2, prompt_tokens=10, cached_tokens=60, completion_tokens=0)
    none = SimpleNamespace(succeeded=0, prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    assert (computed_tokens(done), computed_tokens(cached)) == (80, 0)
    assert work_of(done, 6, 7.0) == RemainingWork(rows_left=6, row_tokens=20.0, rows_seen=4)
    assert work_of(cached, 6, 7.0).row_tokens == 1.0
    assert work_of(none, 6, 7.0) == RemainingWork(rows_left=6, row_tokens=7.0, rows_seen=0)
    assert usual_row_tokens([done, cached, none]) == 10.0
    assert usual_row_tokens([cached, none]) == 1.0
    assert usual_row_tokens([none]) == 500.0


def test_the_backlog_of_a_deadline_that_is_here_has_a_second() -> None:
    found = backlog([job(rows=50, deadline=NOW + 0.5)], 100.0, now=NOW)
    assert found is not None
    assert found.load == 50.0
    assert backlog([job()], 0.0, now=NOW) is None


def ends(*jobs: QueuedJob, rates: Rates | None = None) -> dict[str, float]:
    found = forecasts(jobs, rates or steady(), now=NOW, courses=40)
    return {name: finite(one.done_50) for name, one in found.items()}


def test_jobs_end_in_the_order_of_the_harvester() -> None:
    alone = ends(job("a", deadline=NOW + 9000.0))["a"]
    earlier = ends(job("a", deadline=NOW + 9000.0), job("b", deadline=NOW + 8000.0))
    assert earlier["b"] < earlier["a"]
    assert earlier["a"] > alone + 900.0
    assert ends(job("a", deadline=NOW + 9000.0), job("b", deadline=NOW + 9500.0))["a"] == alone
    above = ends(job("a", deadline=NOW + 9000.0), job("b", priority=1))
    assert above["b"] < above["a"]
    beside = ends(job("a", deadline=NOW + 9000.0), job("b", rows=5000))
    assert alone < beside["a"] < alone + 400.0, "a fifth is kept for the job without a deadline"


def test_a_job_that_expires_leaves_its_time_to_those_behind_it() -> None:
    behind = job("b", deadline=NOW + 90_000.0)
    long = {"rows": 50_000, "deadline": NOW + 3600.0}
    assert ends(job("a", **long), behind)["b"] < NOW + 6000.0
    assert ends(job("a", **long, on_late=OnLate.BEST_EFFORT), behind)["b"] > NOW + 45_000.0


RATES = st.dictionaries(
    st.integers(FIRST - 3 * DAY, FIRST - 1), st.floats(0.1, 1000.0), min_size=1, max_size=60
).map(Rates)


def test_rows_of_an_expired_job_leave_their_time_behind_those_of_a_higher_priority_too() -> None:
    """1,000 s of the higher priority, 1,000 s of `a` until its deadline, then 500 s of `b`."""
    found = ends(
        job("p", rows=1000, priority=1),
        job("a", rows=10_000, deadline=NOW + 2000.0),
        job("b", rows=500, deadline=NOW + 9000.0),
    )
    assert found["b"] - NOW == pytest.approx(2500.0, rel=0.1)


def test_jobs_of_a_forecast_are_those_that_have_rows_to_run() -> None:
    def listed(name: str, **named: object) -> SimpleNamespace:
        values = {"state": JobState.QUEUED, "unanswered": 3, "priority": 0, "deadline": None, "on_late": None}
        counts = {"succeeded": 0, "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        return SimpleNamespace(id=name, **{**values, **counts, **named})

    jobs = [
        listed("paused", state=JobState.PAUSED),
        listed("answered", unanswered=0),
        listed("high", priority=5, state=JobState.RUNNING, deadline=NOW + 1.0),
        listed("late", deadline=NOW, on_late=OnLate.BEST_EFFORT),
    ]
    high, late = queued(jobs, now=NOW)
    assert (high.id, high.seq, high.priority, high.deadline, high.expires) == ("high", 2, 5, NOW + 1.0, True)
    assert (late.id, late.seq, late.priority, late.deadline, late.expires) == ("late", 3, 0, None, False)
    assert (high.work.rows_left, high.work.row_tokens) == (3, UNSEEN_TOKENS)


@given(rates=RATES, seed=st.integers(0, 50), tokens=st.lists(st.floats(0, 1e8), min_size=2, max_size=5))
@hypothesis_settings(max_examples=examples(100))
def test_a_course_is_a_clock(rates: Rates, seed: int, tokens: list[float]) -> None:
    """More tokens take longer, and by the moment at which they are done so many are done."""
    course = Course(rates, now=NOW, seed=seed)
    moments = [course.when(one) for one in sorted(tokens)]
    assert moments == sorted(moments)
    assert all(moment >= NOW for moment in moments)
    for wanted, moment in zip(sorted(tokens), moments, strict=True):
        if reached("within the horizon", moment < inf):
            assert course.by(moment) == pytest.approx(wanted, rel=1e-6, abs=1e-3)
        else:
            assert course.by(NOW + HORIZON_S) <= wanted


@given(tokens=st.floats(0, 1e6), share=st.floats(0, 0.99), others=st.floats(0, 1e6), more=st.floats(0, 1e6))
def test_a_share_of_others_is_given_until_they_are_done(
    tokens: float, share: float, others: float, more: float
) -> None:
    both = with_others(tokens, share, others)
    assert tokens <= both * (1 + 1e-9)
    assert both <= tokens + others + 1e-6 * (tokens + others)
    assert without_others(both, share, others) == pytest.approx(tokens, rel=1e-6, abs=1e-3)
    assert both <= with_others(tokens + more, share, others) * (1 + 1e-9)


@given(deadline=st.integers(60, 100_000), later=st.integers(0, 100_000), rows=st.integers(1, 5000))
@hypothesis_settings(max_examples=examples(30))
def test_a_later_deadline_is_kept_rather(deadline: int, later: int, rows: int) -> None:
    found = [
        forecasts([job(rows=rows, deadline=NOW + due)], steady(), now=NOW, courses=20)["a"]
        for due in (deadline, deadline + later)
    ]
    assert found[0].in_time is not None
    assert found[1].in_time is not None
    assert 0 <= found[0].in_time <= found[1].in_time <= 1


def test_the_backlog_counts_the_work_that_is_due_and_the_load_of_its_deadlines() -> None:
    jobs = [
        job("a", rows=900, deadline=NOW + 3000.0),  # 900 s
        job("b", rows=3600, deadline=NOW + 5000.0),  # 3,600 s more: 4,500 of 5,000
        job("c", rows=100),
    ]
    found = backlog(jobs, 100.0, now=NOW)
    assert found is not None
    assert dict(found.due_s) == {3600: 900.0, 14_400: 4500.0, 43_200: 4500.0, 86_400: 4500.0}
    assert (found.total_s, found.load) == (4600.0, 0.9)
    assert backlog(jobs, None, now=NOW) is None


def test_the_load_of_a_deadline_counts_all_work_of_higher_priorities() -> None:
    """The forecast counts them too, and sees the job late."""
    due = job("due", rows=900, deadline=NOW + 1800.0)  # 900 s

    def load(*others: QueuedJob) -> float:
        found = backlog([due, *others], 100.0, now=NOW)
        assert found is not None
        return found.load

    assert load() == 0.5
    assert load(job("undated", rows=2700, priority=1)) == 2.0
    assert load(job("later", rows=2700, priority=1, deadline=NOW + 9000.0)) == 2.0
    assert load(job("undated", rows=2700), job("lower", rows=2700, priority=-1)) == 0.5

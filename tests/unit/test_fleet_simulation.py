"""The simulation of a fleet on one database agrees with arithmetic where nothing waits, and shows where it does."""

from dataclasses import replace

import pytest

from tests.benchmarks.fleet import Fleet, Simulation, reckoned, simulated

SMALL = Fleet(harvesters=20, rows_per_s=240.0, cores=4, jobs=4)


def test_where_nothing_waits_the_reckoning_holds() -> None:
    by_hand, played = reckoned(SMALL), simulated(SMALL, seconds=20.0)
    assert played.rows_per_s == pytest.approx(SMALL.rows_per_s, rel=0.1)
    assert played.transactions_per_s == pytest.approx(by_hand.transactions_per_s, rel=0.15)
    assert played.cores_busy == pytest.approx(by_hand.cores_busy, rel=0.15)
    assert played.wait_ms < 2 * by_hand.wait_ms


def test_one_jobs_lock_bounds_its_harvesters_and_more_jobs_help() -> None:
    """Transactions of 20 ms under one lock are 50 a second, however many harvesters there are."""
    slow = replace(SMALL, log_ms=20.0, jobs=1)
    alone, shared = simulated(slow, seconds=10.0), simulated(replace(slow, jobs=4), seconds=10.0)
    assert reckoned(slow).lock_busy > 1.5
    assert alone.lock_busy > 0.97
    assert alone.transactions_per_s < 1000 / 20.0 * 1.1
    assert shared.wait_ms < alone.wait_ms / 2
    assert shared.transactions_per_s > 1.3 * alone.transactions_per_s


def test_fewer_writes_relieve_the_lock() -> None:
    slow = replace(SMALL, log_ms=20.0, jobs=1)
    rare = replace(slow, flush_s=1.0)
    assert reckoned(rare).lock_busy < reckoned(slow).lock_busy
    assert simulated(rare, seconds=10.0).lock_busy < 0.9


def test_cores_are_a_bound_too() -> None:
    played = simulated(replace(SMALL, cores=1, before_ms=90.0), seconds=10.0)
    assert 0.95 < played.cores_busy <= 1.001


def test_the_same_seed_plays_the_same_course() -> None:
    first, again, other = (Simulation(SMALL, seed=seed).run(2.0) for seed in (1, 1, 2))
    assert first == again != other

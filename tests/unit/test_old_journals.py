"""Journals of earlier versions, which kept answers unchecked: they are read, compacted and done again."""

import json
from typing import Any

import pytest
from sqlalchemy import text

from conserve.store.books import journal, shards
from conserve.store.books.results import INVALID, TOKEN_COUNTS, checked, counts, decode, encode, is_object
from conserve.store.database.store import Store
from conserve.store.sql.query import views
from tests.commands import conserve
from tests.store_rows import add_job, finish, job, leased, positions, result, select

ODD: dict[str, dict[str, Any]] = {
    "list": {"text": ["x"]},
    "object": {"text": {"a": 1}},
    "number": {"text": 7},
    "tokens": {"prompt_tokens": 3_000_000_000},
    "negative": {"completion_tokens": -5},
    "reason": {"finish_reason": []},
}


def spoil(store: Store, position: int, odd: dict[str, Any], job_id: str = "job-1") -> None:
    """Put what an earlier version wrote in the place of a good answer."""
    with store.write() as tx:
        where = {"job_id": job_id, "position": position}
        found = tx.execute(
            text("select payload from journal where job_id = :job_id and position = :position"), where
        ).scalar_one()
        payload = json.dumps({**json.loads(found), **odd}).encode()
        tx.execute(
            text(
                "update journal set payload = :payload, checksum = null"
                " where job_id = :job_id and position = :position"
            ),
            {**where, "payload": payload},
        )
        for name in TOKEN_COUNTS:
            grown = odd.get(name, 0) - json.loads(found)[name] if name in odd else 0
            tx.execute(text(f"update job set {name} = {name} + {grown} where id = :job_id"), where)


def spoilt_job(store: Store, odd: dict[str, Any]) -> None:
    """Four answers, the second of which does not fit."""
    add_job(store, rows=4)
    finish(store, leased(store), prompt_tokens=3, completion_tokens=2)
    spoil(store, 1, odd)


def read(store: Store) -> list[tuple[Any, ...]]:
    with views(store, now=0.0) as opened:
        return opened.duck.execute(
            "select row_index, text, error_type, prompt_tokens from results order by 1"
        ).fetchall()


WANTED = [(0, "yes", None, 3), (1, None, INVALID, 0), (2, "yes", None, 3), (3, "yes", None, 3)]


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_an_answer_that_does_not_fit_is_read_as_the_error_of_its_row(
    store: Store, odd: dict[str, Any]
) -> None:
    spoilt_job(store, odd)
    assert read(store) == WANTED
    shown = conserve("results", "job-1")
    assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 4), shown.stderr
    error = json.loads(shown.stdout.splitlines()[1])["error"]
    assert "does not fit the columns of results" in error
    assert "conserve retry" in error


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_compaction_makes_it_a_failed_row_that_retry_finds(store: Store, odd: dict[str, Any]) -> None:
    spoilt_job(store, odd)
    assert shards.compact(store, "job-1", now=0.0) == 4
    assert read(store) == WANTED
    assert select(store, "select failed, num_rows from shard order by failed") == [(0, 3), (1, 1)]
    stored = job(store)
    assert (stored.succeeded, stored.failed, stored.prompt_tokens, stored.completion_tokens) == (3, 1, 9, 6)
    assert shards.retry_failed(store, "job-1", now=0.0) == 1
    lease = leased(store)
    assert positions(lease) == [1]
    finish(store, lease, prompt_tokens=3, completion_tokens=2)
    assert read(store) == [(n, "yes", None, 3) for n in range(4)]
    assert (job(store).succeeded, job(store).failed, job(store).prompt_tokens) == (4, 0, 12)


def test_an_answer_that_does_not_fit_and_has_a_checksum_gets_that_of_its_error(store: Store) -> None:
    spoilt_job(store, ODD["list"])
    ((payload,),) = select(store, "select payload from journal where position = 1")
    with store.write() as tx:
        tx.execute(
            text("update journal set checksum = :checksum where position = 1"),
            {"checksum": journal.checksum("job-1", 1, False, payload)},
        )
    assert shards.compact(store, "job-1", now=0.0) == 4
    assert read(store) == WANTED


def test_a_payload_that_is_none_is_left_out_and_stays_where_a_check_finds_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    add_job(store, rows=2)
    finish(store, leased(store))
    with store.write() as tx:
        tx.execute(text("update journal set payload = :payload where position = 1"), {"payload": b"\xff{"})
    assert read(store) == [(0, "yes", None, 0)]
    assert shards.compact(store, "job-1", now=0.0) == 1
    assert caplog.messages[0] == "row 1 of job job-1 is damaged in the journal; run: conserve check"
    assert shards.retry_failed(store, "job-1", now=0.0) == 1


def test_a_compactor_that_finds_the_answer_done_again_changes_nothing(store: Store) -> None:
    spoilt_job(store, ODD["list"])
    spoil(store, 2, ODD["list"])
    rows = shards.oldest(store, "job-1", failed=False, at_least=1)
    found = journal.misfits(rows)
    assert [misfit.position for misfit in found] == [1, 2]
    with store.write() as tx:
        assert journal.fail_misfits(tx, "job-1", found[:1]) == 1
        assert journal.fail_misfits(tx, "job-1", found[:1]) == 0
        assert journal.fail_misfits(tx, "job-1", found) == 1, "of two, of which one was turned"
    assert (job(store).succeeded, job(store).failed, job(store).prompt_tokens) == (2, 2, 6)


def test_a_run_over_such_a_journal_ends_and_the_rows_can_be_done_again(store: Store) -> None:
    spoilt_job(store, ODD["object"])
    assert job(store).state == "completed"
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    counted = conserve("sql", "--json", "select count(*) as n, count(error_type) as failed from results")
    assert json.loads(counted.stdout) == {"n": 4, "failed": 1}
    assert "1 failed row back" in conserve("retry", "job-1").stdout


@pytest.mark.parametrize(
    "values",
    [
        {"text": "half \ud83d"},
        {"text": ["x"]},
        {"model": "half \ud83d"},
        {"prompt_tokens": 2**31},
        {"prompt_tokens": 10**20},
        {"prompt_tokens": -1},
        {"error": 7},
        {"custom_id": "half \ud83d", "text": object()},
    ],
)
def test_what_could_not_be_read_again_is_written_as_an_error(values: dict[str, Any]) -> None:
    wanted = result(3, attempts=2, **{"custom_id": "mine", **values})
    found, payload = checked(wanted)
    assert decode(payload) == found
    assert (found.error_type, found.row_index, found.attempts, found.finished_at) == (INVALID, 3, 2, 2.0)
    assert found.custom_id is not None
    assert (found.text, found.prompt_tokens) == (None, 0)


def test_an_answer_that_does_not_fit_keeps_what_is_the_rows_own() -> None:
    times: dict[str, Any] = {"submitted_at": 3.5, "started_at": 4.5, "finished_at": 5.5}
    wanted = result(3, attempts=2, custom_id="mine", prompt_tokens=9, **times)
    read_again = decode(encode(wanted).replace(b'"text":"yes"', b'"text":7'))
    assert (read_again.error_type, read_again.text, read_again.prompt_tokens) == (INVALID, None, 0)
    own = ("row_index", "attempts", "custom_id", *times)
    assert [getattr(read_again, name) for name in own] == [getattr(wanted, name) for name in own]


@pytest.mark.parametrize("payload", [b"\xff{", b"[]", b'{"row_index":"x"}'])
def test_a_payload_that_names_no_row_is_of_none(payload: bytes) -> None:
    read_again = decode(payload)
    assert (read_again.error_type, read_again.row_index, read_again.attempts) == (INVALID, -1, 1)
    assert (read_again.submitted_at, read_again.started_at, read_again.finished_at) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("payload", "counted", "whole"),
    [
        (b"\xff{", {}, False),
        (b"[1]", {}, False),
        (b"{}", {}, True),
        (b'{"text":7,"prompt_tokens":-4,"cached_tokens":"x","resumed_tokens":3}',
         {"prompt_tokens": -4, "resumed_tokens": 3}, True),
    ],
)  # fmt: skip
def test_counts_of_a_payload_are_what_was_counted(
    payload: bytes, counted: dict[str, int], whole: bool
) -> None:
    assert counts(payload) == dict.fromkeys(TOKEN_COUNTS, 0) | counted
    assert is_object(payload) is whole


def test_a_result_that_fits_is_written_as_it_is() -> None:
    for wanted in (
        result(0),
        result(1, failed=True),
        result(2, prompt_tokens=2**31 - 1, text="\0\x1b é 😀"),
        result(2**63 - 1, finished_at=253_402_300_799.0, submitted_at=0.0),
    ):
        found, payload = checked(wanted)
        assert found is wanted
        assert payload == encode(wanted)
        assert decode(payload) == wanted

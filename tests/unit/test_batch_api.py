"""OpenAI's own client against a live Batch API, with the fake endpoint computing."""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from openai.types import Batch
from sqlalchemy import text
from starlette.requests import Request

from conserve import http_server
from conserve.batch_api import bodies, serving, upload, workers
from conserve.batch_api.refusals import Refused
from conserve.batch_api.serving import serve
from conserve.batch_api.workers import Admissions
from conserve.config import Settings, load
from conserve.errors import JobRefused, StoreError, StoreMoved
from conserve.jobs.batches.lines import Limits
from conserve.store.books import batches, catalog, uploads
from conserve.store.books.batch_state import BatchState
from conserve.store.books.batches import NewBatch
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import JobState
from conserve.store.books.uploads import NewFile
from conserve.store.database.moves import MoveMark, MoveState
from conserve.store.database.store import Store
from conserve.store.files import trash
from conserve.store.files.objects import below
from tests import patient
from tests.batch_rig import CHAT, answered, client, compute, create, lines, live, quick_looks, reaches
from tests.commands import HANGS_S, conserve, until
from tests.played_bucket import Service as Bucket
from tests.played_bucket import play
from tests.store_rows import add_job, add_mark, finish, leased


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    with live(store, Limits(file_bytes=100_000, requests=50)) as found:
        yield found


@pytest.fixture
def api(url: str) -> openai.OpenAI:
    return client(url)


def stamps(batch: Batch) -> set[str]:
    """The time stamps that are set."""
    return {name for name, value in batch.to_dict().items() if name.endswith("_at") and value is not None}


def test_a_file_becomes_a_batch_becomes_answers(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one", "two", "REJECT", "four"], metadata={"night": "1"})
    assert (batch.status, batch.object) == ("validating", "batch")
    assert batch.request_counts is not None
    assert stamps(batch) == {"created_at", "expires_at"}
    running = reaches(api, batch.id, "in_progress")
    assert running.request_counts is not None
    assert running.request_counts.to_dict() == {"total": 4, "completed": 0, "failed": 0}
    assert running.output_file_id is running.error_file_id is None
    compute(store)
    done = reaches(api, batch.id, "completed")
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 4, "completed": 3, "failed": 1}
    assert stamps(done) == {*("created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at")}
    answers = answered(api, done.output_file_id)
    assert answers.keys() == {"r-0", "r-1", "r-3"}
    assert answers["r-0"]["response"]["status_code"] == 200
    assert answers["r-0"]["response"]["body"]["choices"][0]["message"]["content"]
    (failed,) = answered(api, done.error_file_id).values()
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("r-2", 400)
    assert failed["error"]["code"] == "invalid_request"
    assert done.metadata == {"night": "1"}
    assert done.usage is not None
    assert done.usage.output_tokens == 12


def test_lines_may_have_fields_that_a_batch_does_not_know(store: Store, api: openai.OpenAI) -> None:
    content = lines(["one", "two"]).replace(b"}\n", b', "metadata": {"set": 1}}\n', 1)
    file = api.files.create(file=("extra.jsonl", content), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert reaches(api, batch.id, "in_progress", "failed").status == "in_progress"
    compute(store)
    done = reaches(api, batch.id, "completed")
    assert answered(api, done.output_file_id).keys() == {"r-0", "r-1"}


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
def test_other_endpoints(store: Store, api: openai.OpenAI, endpoint: str) -> None:
    batch = create(api, ["one", "two"], endpoint)
    reaches(api, batch.id, "in_progress")
    compute(store)
    done = reaches(api, batch.id, "completed")
    assert done.endpoint == endpoint
    assert answered(api, done.output_file_id).keys() == {"r-0", "r-1"}


def test_a_batch_of_which_every_row_failed_is_completed_with_errors_alone(
    store: Store, api: openai.OpenAI
) -> None:
    batch = create(api, ["REJECT a", "REJECT b"])
    reaches(api, batch.id, "in_progress")
    compute(store)
    done = reaches(api, batch.id, "completed")
    assert done.output_file_id is None
    assert answered(api, done.error_file_id).keys() == {"r-0", "r-1"}


def test_a_bad_input_fails_with_the_lines_at_fault(api: openai.OpenAI) -> None:
    content = lines(["a"]) + b'{"custom_id": "r-0"}\nno json\n' + lines(["b"])
    file = api.files.create(file=("bad.jsonl", content), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    failed = reaches(api, batch.id, "failed")
    assert failed.errors is not None
    assert [(error.line, error.code) for error in failed.errors.data or []] == [
        (2, "missing_required_parameter"),
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
    ]
    assert stamps(failed) == {"created_at", "expires_at", "failed_at"}


def test_too_many_requests_fail_the_batch(api: openai.OpenAI) -> None:
    failed = reaches(api, create(api, ["q"] * 51).id, "failed")
    assert failed.errors is not None
    assert [error.code for error in failed.errors.data or []] == ["too_many_requests"]


def test_a_cancelled_batch_keeps_the_results_it_has(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one", "two"])
    reaches(api, batch.id, "in_progress")
    cancelled = api.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    assert cancelled.cancelling_at is not None
    done = reaches(api, batch.id, "cancelled")
    assert done.cancelled_at is not None
    assert (done.output_file_id, done.error_file_id) == (None, None)
    assert api.batches.cancel(batch.id).status == "cancelled"


def test_no_result_comes_after_those_of_a_cancelled_batch_that_were_delivered(store: Store) -> None:
    job_id = add_job(store, rows=4)
    lease = leased(store, lease_s=1.0)
    with store.write() as tx:
        batches.of_submitted(tx, job_id, now=0.0)
        catalog.move(tx, job_id, "cancel", now=0.5)
        (batch,) = batches.page(tx, "default", before=None, limit=1)
        assert batches.deliverable(tx, asked=[batch.id], now=0.9) == [], "rows are in flight"
        assert batches.deliverable(tx, asked=[batch.id], now=1.1) == [batch.id]
        batches.fence(tx, job_id)
    assert len(finish(store, lease).late) == 4


def test_a_completed_batch_cannot_be_cancelled(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one"])
    reaches(api, batch.id, "in_progress")
    compute(store)
    reaches(api, batch.id, "completed")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'completed'"):
        api.batches.cancel(batch.id)


@pytest.mark.parametrize("state", [JobState.EXPIRED, JobState.FAILED, JobState.COMPLETED])
def test_a_batch_that_has_ended_stays_as_it_is(store: Store, state: JobState) -> None:
    job_id = add_job(store)
    with store.write() as tx:
        batches.of_submitted(tx, job_id, now=0.0)
        tx.execute(text("update job set state = :state, finished_at = 1.0"), {"state": state.value})
        (batch,) = batches.page(tx, "default", before=None, limit=1)
    with pytest.raises(JobRefused, match="has ended"), store.write() as tx:
        batches.cancel(tx, batch, now=2.0)
    with store.read() as tx:
        (same,) = batches.page(tx, "default", before=None, limit=1)
    assert same == batch


def test_a_submitted_job_shows_as_a_batch(store: Store, api: openai.OpenAI, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(["one", "two"]))
    job_id = conserve("submit", str(tmp_path / "rows.jsonl"), "--tag", "a=b").stdout.strip()
    (batch,) = api.batches.list().data
    assert (batch.status, batch.endpoint, batch.completion_window) == ("in_progress", CHAT, "none")
    ours = {"job": job_id, "state": "queued", "on_late": "expire", "forecast": None}
    assert batch.to_dict()["conserve"] == ours
    compute(store)
    done = reaches(api, batch.id, "completed")
    assert answered(api, done.output_file_id).keys() == {"r-0", "r-1"}


def test_a_batch_is_a_job(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one"])
    reaches(api, batch.id, "in_progress")
    (job,) = read_jobs(load(), now=0.0)
    assert job.tags == {"batch": batch.id}
    assert conserve("pause", job.id).returncode == 0
    assert reaches(api, batch.id, "in_progress").to_dict()["conserve"]["state"] == "paused"
    assert conserve("cancel", job.id).returncode == 0
    assert reaches(api, batch.id, "cancelled").cancelling_at is not None
    assert conserve("rm", job.id, "--yes").returncode == 0
    with pytest.raises(openai.NotFoundError):
        api.batches.retrieve(batch.id)


def test_failed_rows_that_are_tried_again_are_delivered_again(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one", "FAULT"])
    reaches(api, batch.id, "in_progress")
    compute(store, "--max-attempts", "1")
    before = reaches(api, batch.id, "completed")
    (job,) = read_jobs(load(), now=0.0)
    assert conserve("retry", job.id).returncode == 0
    again = api.batches.retrieve(batch.id)
    assert (again.status, again.error_file_id) == ("in_progress", None)
    compute(store, "--max-attempts", "1")
    after = reaches(api, batch.id, "completed")
    assert after.error_file_id != before.error_file_id
    assert answered(api, after.output_file_id).keys() == {"r-0"}
    with pytest.raises(openai.NotFoundError):
        api.files.content(str(before.error_file_id))


def test_files_are_listed_shown_and_deleted(store: Store, api: openai.OpenAI) -> None:
    assert api.files.list().data == [], "LiteLLM asks for it before anything else"
    first = api.files.create(file=("a.jsonl", b"a\n"), purpose="batch")
    second = api.files.create(
        file=("b.jsonl", b"b"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (second.expires_at or 0) - second.created_at in (3599, 3600, 3601)
    assert [file.id for file in api.files.list(limit=1)] == [second.id, first.id], "all pages"
    assert [file.id for file in api.files.list(order="asc").data] == [first.id, second.id]
    assert api.files.list(purpose="batch_output").data == []
    assert api.files.retrieve(first.id) == first
    assert api.files.content(first.id).content == b"a\n"
    assert api.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(first.id)
    assert [path.name for path in uploads.folder(store).iterdir()] == [f"{second.id}.jsonl"]


def test_files_can_be_deleted_as_they_are_listed(api: openai.OpenAI) -> None:
    made = [api.files.create(file=("a.jsonl", b"a"), purpose="batch").id for _ in range(5)]
    deleted = [api.files.delete(file.id).id for file in api.files.list(limit=2)]
    assert deleted == made[::-1]
    assert api.files.list().data == []
    with pytest.raises(openai.NotFoundError, match="No such file"):
        api.files.list(after="file-none")


def test_batches_are_listed_the_newest_first_by_pages(api: openai.OpenAI) -> None:
    made = [create(api, [f"q{n}"]).id for n in range(5)]
    page = api.batches.list(limit=2)
    assert (page.has_more, [batch.id for batch in page.data]) == (True, made[:2:-1])
    assert [batch.id for batch in page] == made[::-1]


def test_a_deleted_input_fails_a_batch_that_needs_it_and_no_other(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one"])
    reaches(api, batch.id, "in_progress")
    api.files.delete(batch.input_file_id)
    compute(store)
    assert reaches(api, batch.id, "completed").output_file_id
    with pytest.raises(openai.BadRequestError, match="No such file"):
        api.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


def test_a_repeated_request_with_its_key_makes_nothing_twice(api: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "night-1"}
    content = ("a.jsonl", lines(["a"]))
    files = [api.files.create(file=content, purpose="batch", extra_headers=headers) for _ in range(2)]
    assert files[0] == files[1]
    with pytest.raises(openai.BadRequestError, match="used for another file"):
        api.files.create(file=("a.jsonl", b"b"), purpose="batch", extra_headers=headers)

    def ask(window: str, **more: object) -> Batch:
        return api.batches.create(
            input_file_id=files[0].id,
            endpoint=CHAT,
            completion_window=window,  # type: ignore[arg-type]
            extra_headers=headers,
            **more,  # type: ignore[arg-type]
        )

    assert ask("24h").id == ask("24h").id
    with pytest.raises(openai.BadRequestError, match="used for another batch"):
        ask("7d")
    with pytest.raises(openai.BadRequestError, match="used for another batch"):
        ask("24h", output_expires_after={"anchor": "created_at", "seconds": 3600})
    assert len(api.batches.list().data) == 1
    life = {"anchor": "created_at", "seconds": 3600}
    with pytest.raises(openai.BadRequestError, match="used for another file"):
        api.files.create(file=content, purpose="batch", extra_headers=headers, expires_after=life)  # type: ignore[arg-type]


def test_the_key_of_an_upload_that_has_expired_is_free_again(store: Store, api: openai.OpenAI) -> None:
    asked = {"file": ("a.jsonl", b"a"), "purpose": "batch", "extra_headers": {"Idempotency-Key": "k"}}
    first = api.files.create(**asked)  # type: ignore[arg-type]
    with store.write() as tx:
        tx.execute(text("update file set expires_at = 1.0"))
    again = api.files.create(**asked)  # type: ignore[arg-type]
    assert again.id != first.id
    assert api.files.create(**asked) == again  # type: ignore[arg-type]


def test_an_upload_whose_record_may_be_there_stays_for_the_sweep(
    store: Store, api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise StoreError("the connection broke, perhaps behind the commit")

    monkeypatch.setattr(uploads, "add", lost)
    with pytest.raises(openai.InternalServerError):
        api.files.create(file=("a.jsonl", b"a"), purpose="batch")
    (left,) = uploads.folder(store).iterdir()
    assert left.read_bytes() == b"a"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_a_wrong_parameter_is_named(url: str, asked: dict[str, object], param: str) -> None:
    body = {"input_file_id": "file-a", "endpoint": CHAT, "completion_window": "24h", **asked}
    answer = patient.post(f"{url}/batches", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_body_with_half_an_emoji_fails_alone(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one", "cut \ud83d"])
    reaches(api, batch.id, "in_progress")
    compute(store)
    done = reaches(api, batch.id, "completed")
    assert answered(api, done.output_file_id).keys() == {"r-0"}
    (failed,) = answered(api, done.error_file_id).values()
    assert failed["custom_id"] == "r-1"
    assert "half of a surrogate pair" in json.dumps(failed)


def test_an_upload_beyond_the_limit_is_refused_and_leaves_nothing(store: Store, api: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        api.files.create(file=("a.jsonl", b"a" * 20_000_000), purpose="batch")
    assert refused.value.status_code == 413
    assert list(uploads.folder(store).iterdir()) == []


def test_an_input_that_cannot_be_read_holds_up_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = workers.admit
    asked: list[str] = []

    def broken(store: Store, batch_id: str, limits: Limits, *, now: float) -> None:
        asked.append(batch_id)
        if len(asked) == 1:
            raise StoreError("this file alone")
        admit(store, batch_id, limits, now=now)

    with store.write() as tx:
        new = NewBatch(file_id="file-gone", endpoint=CHAT, completion_window="24h", window_s=1.0)
        made = [batches.add(tx, "default", new, now=0.0) for _ in range(2)]
    monkeypatch.setattr(workers, "admit", broken)
    with pytest.raises(StoreError):
        Admissions(store, Limits()).step(0.0)
    with store.read() as tx:
        states = [found.state for batch_id in made if (found := batches.anywhere(tx, batch_id))]
    assert states == [BatchState.VALIDATING, BatchState.FAILED], "its input was deleted"


@pytest.mark.parametrize("before", [True, False], ids=["before", "meanwhile"])
def test_inputs_become_no_jobs_while_the_store_is_elsewhere(
    store: Store, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    asked: list[str] = []

    def moving(store: Store, batch_id: str, limits: Limits, *, now: float) -> None:
        asked.append(batch_id)
        add_mark(store, MoveState.LEAVING)
        admit(store, batch_id, limits, now=now)

    admit = workers.admit
    with store.write() as tx:
        new = NewBatch(file_id="file-gone", endpoint=CHAT, completion_window="24h", window_s=1.0)
        made = [batches.add(tx, "default", new, now=0.0) for _ in range(2)]
    monkeypatch.setattr(workers, "admit", moving)
    if before:
        add_mark(store, MoveState.LEAVING)
    admissions = Admissions(store, Limits())
    admissions.step(0.0)
    assert asked == made[: 0 if before else 1]
    monkeypatch.setattr(workers, "admit", admit)
    add_mark(store, None)
    admissions.step(0.0)
    with store.read() as tx:
        assert batches.validating(tx) == []


@pytest.mark.parametrize(
    ("content", "purpose", "param"),
    [(b"", "batch", "file"), (b"a", "fine-tune", "purpose")],
)
def test_an_upload_that_is_no_batch_file_is_refused(
    store: Store, api: openai.OpenAI, content: bytes, purpose: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.files.create(file=("a.jsonl", content), purpose=purpose)  # type: ignore[arg-type]
    assert refused.value.param == param
    assert list(uploads.folder(store).iterdir()) == []


def begun(**fields: str) -> bytes:
    """A request with these fields, the file's first byte, and a thousand bytes to come."""
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    body = f'{"".join(parts)}--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{{'
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + 1000}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    return (head + body).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"purpose": "fine-tune"},
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
    ],
)
def test_a_wrong_field_before_the_file_is_refused_before_the_file_comes(
    url: str, fields: dict[str, str]
) -> None:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as sending:
        sending.sendall(begun(**fields))
        with sending.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 400 Bad Request\r\n"


def test_fields_may_stand_behind_the_file(url: str) -> None:
    life = {"expires_after[anchor]": "created_at", "purpose": "batch", "expires_after[seconds]": "3600"}
    parts = [f'name="{name}"\r\n\r\n{value}\r\n' for name, value in life.items()]
    parts.insert(1, 'name="file"; filename="a"\r\n\r\n{}\r\n')
    body = "".join(f"--b\r\nContent-Disposition: form-data; {part}" for part in parts) + "--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    stored = patient.post(f"{url}/files", content=body.encode(), headers=headers).json()
    assert stored["expires_at"] - stored["created_at"] == 3600


def test_a_form_that_ends_early_is_refused(store: Store, url: str) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = patient.post(f"{url}/files", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body ended within the form; send it again"
    assert list(uploads.folder(store).iterdir()) == []


@pytest.mark.parametrize(("length", "status"), [(2_500, 200), (2_800, 400)])
def test_the_headers_of_a_part_are_bounded_whatever_the_parser_does(
    store: Store, url: str, length: int, status: int
) -> None:
    named = "".join(f"X-{number}: {'x' * length}\r\n" for number in range(3))
    file = 'Content-Disposition: form-data; name="file"; filename="a"\r\n'
    purpose = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body = f"{purpose}--b\r\n{named}{file}\r\n{{}}\r\n--b--\r\n".encode()
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = patient.post(f"{url}/files", content=body, headers=headers)
    assert answer.status_code == status
    assert (status == 200) == ("headers of a part of the form have more than 8,192" not in answer.text)


@pytest.mark.parametrize(("left", "status"), [(0, 200), (-1, 503)])
def test_uploads_leave_the_disk_room_for_all_else(
    store: Store,
    url: str,
    left: int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=upload.LEAST_FREE + left)

    monkeypatch.setattr(upload.shutil, "disk_usage", usage)
    answer = patient.post(f"{url}/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
    assert answer.status_code == status
    assert set(asked) == {uploads.folder(store)}
    kept = [path.name for path in Path(str(uploads.folder(store))).iterdir()]
    assert len(kept) == (1 if status == 200 else 0)
    assert (status == 503) == ("less than 1 GiB is free" in caplog.text)
    assert str(store.home) not in answer.text


def test_an_upload_of_which_no_more_comes_ends(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "PART_S", 0.0)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as stalled:
        stalled.sendall(begun(purpose="batch"))
        with stalled.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
    until(lambda: list(uploads.folder(store).iterdir()) == [])


def test_a_request_of_which_no_more_comes_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PART_S", 0.0)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as stalled:
        stalled.sendall(b"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        with stalled.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 408 Request Timeout\r\n"


def test_a_client_that_leaves_within_a_request_is_no_error_of_the_server() -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    with pytest.raises(Refused, match="the body ended early; send it again"):
        asyncio.run(bodies.whole_body(Request({"type": "http"}, receive)))


def test_a_part_of_a_file_can_be_downloaded(url: str, api: openai.OpenAI) -> None:
    file = api.files.create(file=("a.jsonl", b"0123456789"), purpose="batch")
    answer = patient.get(f"{url}/files/{file.id}/content", headers={"Range": "bytes=2-4"})
    assert (answer.status_code, answer.content) == (206, b"234")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The service of a bucket."""
    (tmp_path / "service" / "lake").mkdir(parents=True)
    return play(tmp_path / "service", monkeypatch)


@pytest.fixture
def content(settings: Settings, bucket: Bucket) -> Iterator[str]:
    """Address of the contents of a file with ten bytes in a bucket."""
    place = {"home": settings.home, "store": settings.store, "data": "s3://lake"}
    with closing(Store.open(load(place, environ={}))) as store:
        path = uploads.make_folder(store) / "a.jsonl"
        path.write_bytes(b"0123456789")
        described = {"purpose": "batch", "filename": "a.jsonl", "num_lines": 1, "digest": "d1", "bytes": 10}
        with store.write() as tx:
            new = NewFile(path=below(path, store.data), **described)
            uploads.add(tx, "default", "file-a", new, now=time.time())
        with live(store) as url:
            bucket.asked.clear()
            yield f"{url}/files/file-a/content"


@pytest.mark.parametrize(
    ("asked", "status", "found", "told"),
    [
        ({}, 200, b"0123456789", None),
        ({"Range": "bytes=2-4"}, 206, b"234", "bytes 2-4/10"),
        ({"Range": "bytes=8-"}, 206, b"89", "bytes 8-9/10"),
        ({"Range": "bytes=8-99"}, 206, b"89", "bytes 8-9/10"),
        ({"Range": "bytes=-3"}, 206, b"789", "bytes 7-9/10"),
        ({"Range": "bytes=-99"}, 206, b"0123456789", "bytes 0-9/10"),
        ({"Range": "bytes=2-4", "If-Range": '"d1"'}, 206, b"234", "bytes 2-4/10"),
        ({"Range": "bytes=2-4", "If-Range": '"d0"'}, 200, b"0123456789", None),
        ({"Range": "bytes=0-1,4-5"}, 200, b"0123456789", None),
        ({"Range": "bytes=-"}, 200, b"0123456789", None),
        ({"Range": "lines=2-4"}, 200, b"0123456789", None),
        ({"Range": "bytes=10-"}, 416, None, "bytes */10"),
    ],
)
def test_a_part_of_an_object_can_be_downloaded(
    content: str, asked: dict[str, str], status: int, found: bytes | None, told: str | None
) -> None:
    answer = patient.get(content, headers=asked)
    assert (answer.status_code, answer.headers.get("content-range")) == (status, told)
    if found is not None:
        assert answer.content == found
        assert int(answer.headers["content-length"]) == len(found)
        assert (answer.headers["etag"], answer.headers["accept-ranges"]) == ('"d1"', "bytes")


def test_an_object_is_described_without_being_read(content: str, bucket: Bucket) -> None:
    answer = patient.head(content)
    assert (answer.status_code, answer.headers["content-length"]) == (200, "10")
    assert [name for name, about in bucket.asked if about.endswith("a.jsonl")] == ["get_file_info"]


@pytest.mark.parametrize("path", ["/files/..%2f..%2fetc", "/files/file-%7f", "/nothing", "/batches/%00"])
def test_other_paths_are_not_found(url: str, path: str) -> None:
    answer = patient.get(url + path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_what_a_killed_process_left_undone_is_done_at_the_next_start(store: Store) -> None:
    with live(store) as url:
        batch = create(client(url), ["one"])
        reaches(client(url), batch.id, "in_progress")
    compute(store)
    with live(store) as url:
        assert reaches(client(url), batch.id, "completed").output_file_id


def test_outputs_expire(store: Store, api: openai.OpenAI) -> None:
    batch = create(api, ["one"], output_expires_after={"anchor": "created_at", "seconds": 3600})
    reaches(api, batch.id, "in_progress")
    compute(store)
    done = reaches(api, batch.id, "completed")
    file = api.files.retrieve(str(done.output_file_id))
    assert file.expires_at == file.created_at + 3600
    expired = file.expires_at + 1.0
    assert uploads.remove_expired(store, now=expired) == 1
    with pytest.raises(openai.NotFoundError):
        api.files.content(file.id)


def test_uploads_that_no_record_names_are_swept_after_a_day(store: Store) -> None:
    folder = uploads.make_folder(store)
    for name in ("file-old.jsonl", "file-new.tmp"):
        (folder / name).write_bytes(b"a")
    os.utime(folder / "file-old.jsonl", (0, 0))
    assert uploads.sweep_uploads(store, now=(folder / "file-new.tmp").stat().st_mtime + 10) == 1
    assert [path.name for path in folder.iterdir()] == ["file-new.tmp"]
    assert [path.name for path in trash.folder(store.home).rglob("*.jsonl")] == ["file-old.jsonl"]


def test_a_method_that_is_not_answered_is_told_all_that_are(store: Store) -> None:
    with live(store) as url:
        answer = patient.options(f"{url}/files")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
        assert patient.put(f"{url}/files/file-1").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize("state", [MoveState.LEAVING, MoveState.LEFT])
def test_callers_are_told_of_a_store_that_is_elsewhere(store: Store, state: MoveState) -> None:
    said = MoveMark(id="m", state=state, other="there", store_id=store.id).sentence
    with live(store) as url:
        api = client(url)
        batch = create(api, ["one"])
        reaches(api, batch.id, "in_progress")
        add_mark(store, state)
        with pytest.raises(openai.InternalServerError, match="there") as refused:
            api.files.create(file=("a.jsonl", lines(["one"])), purpose="batch")
        assert (refused.value.status_code, refused.value.body["message"]) == (503, said)  # type: ignore[index]
        health = url.replace("/v1", "/health")
        until(lambda: patient.get(health).status_code == 503)
        assert "there" not in patient.get(health).text, "those who need no key learn no address"
        for path in ("files", f"batches/{batch.id}", f"batches/{batch.id}/events", "nowhere"):
            answer = patient.get(f"{url}/{path}")
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, said)
        add_mark(store, None)
        until(lambda: patient.get(health).status_code == 200)
        assert api.batches.retrieve(batch.id).status == "in_progress"


def test_a_connection_at_rest_outlives_polls_of_clients_and_the_minute_of_proxies(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[uvicorn.Config] = []

    class NotedServer(serving.SignalledServer):
        def __init__(self, config: uvicorn.Config) -> None:
            configs.append(config)
            super().__init__(config)

    monkeypatch.setattr(serving, "SignalledServer", NotedServer)
    with quick_looks(), pytest.raises(StoreMoved):
        serve(store, Limits(), on_ready=lambda: add_mark(store, MoveState.LEFT))
    assert [config.timeout_keep_alive > 60 for config in configs] == [True]


def test_silent_connections_make_room_for_a_client(store: Store, port: int) -> None:
    found = list[object]()

    def ask() -> None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as silent:
                found.append(patient.get(f"http://127.0.0.1:{port}/health").status_code)
                found.append(silent.recv(1))
        finally:
            add_mark(store, MoveState.LEFT)

    asking = threading.Thread(target=ask)
    with quick_looks(), pytest.raises(StoreMoved):
        serve(store, Limits(), port=port, connections=1, on_ready=asking.start)
    asking.join()
    assert found == [200, b""]


def test_an_api_by_itself_ends_once_its_store_is_elsewhere(store: Store) -> None:
    with quick_looks(), pytest.raises(StoreMoved, match="this store was moved to there"):
        serve(store, Limits(), on_ready=lambda: add_mark(store, MoveState.LEFT))

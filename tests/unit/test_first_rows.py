"""A job whose first rows are refused in the same words is paused: its parameters are at fault."""

import asyncio
import json
import time
from collections.abc import Callable

import httpx
import pytest

from conserve.cli import exits
from conserve.cli.run import of_first_rows
from conserve.config import Settings, load
from conserve.endpoints import http
from conserve.endpoints.fake import FakeEndpoint
from conserve.endpoints.http import HttpEndpoint
from conserve.errors import StoreError
from conserve.jobs.harvest.first_rows import FIRST_ROWS, TAKEN_BACK_S, FirstRowsEndpoint
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import JobState
from conserve.store.database.store import Store
from tests import virtual_time
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.store_rows import job
from tests.submitting import submit

ROWS = 100
UNSUPPORTED = "Unsupported parameter: 'max_tokens' is not supported with this model."


class Choosy:
    """A server that rejects each row in the words that a function of its text returns, if it returns any."""

    def __init__(self, words: Callable[[str], str | None]) -> None:
        self.words, self.rows = words, 0

    def serve(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            known = request.url.path == "/v1/models"
            return httpx.Response(200 if known else 404, json={"data": [{"id": "served"}]})
        body = json.loads(request.content)
        if body.get("max_tokens") == 1 or body.get("max_completion_tokens") == 1:  # a small request
            return httpx.Response(200, json={"choices": [{"message": {"content": "a"}}]})
        self.rows += 1
        words = self.words(body["messages"][0]["content"])
        if words is not None:
            return httpx.Response(400, json={"error": {"message": words}})
        return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})

    def endpoint(self) -> HttpEndpoint:
        return HttpEndpoint("http://server", transport=httpx.MockTransport(self.serve), most_rows=4)


@pytest.fixture
def job_id(store: Store, write_input: WriteInput) -> str:
    rows = str(write_input(q=[f"{n:03}" for n in range(ROWS)]))
    return submit(store, rows, Task(kind=Kind.PROMPT, template="{{ q }}")).job_id


def run(store: Store, server: Choosy, *new: str) -> FirstRowsEndpoint:
    endpoint = FirstRowsEndpoint(server.endpoint(), store, new)

    async def go() -> None:
        await Harvester(store, endpoint, clock=asyncio.get_running_loop().time).run(asyncio.Event())

    virtual_time.run(go())
    return endpoint


def test_a_job_is_paused_where_its_first_rows_are_refused_in_the_same_words(
    store: Store, job_id: str, write_input: WriteInput
) -> None:
    rows = str(write_input(q=["good"] * ROWS))
    good = submit(store, rows, Task(kind=Kind.PROMPT, template="{{ q }}")).job_id
    server = Choosy(lambda text: None if text == "good" else UNSUPPORTED)
    endpoint = run(store, server, job_id, good)
    assert list(endpoint.paused) == [job_id]
    assert endpoint.paused[job_id].startswith(f"the first {FIRST_ROWS} rows of job {job_id} were refused")
    assert job(store, job_id).error == f"its first rows were refused: HTTP 400: {UNSUPPORTED}"
    assert job(store, job_id).state is JobState.PAUSED
    assert FIRST_ROWS <= job(store, job_id).failed < FIRST_ROWS + 4
    assert job(store, good).state is JobState.COMPLETED
    with store.write() as tx:  # as the sentence says: the others are sent all the same
        catalog.move(tx, job_id, "resume", now=0.0)
    run(store, server)
    assert (job(store, job_id).failed, job(store, job_id).error) == (ROWS, None)


def test_a_job_that_cannot_be_paused_goes_on(
    store: Store, job_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise StoreError("the store is away")

    monkeypatch.setattr(catalog, "move", unreachable)
    endpoint = run(store, Choosy(lambda _: UNSUPPORTED), job_id)
    assert (endpoint.paused, job(store, job_id).failed) == ({}, ROWS)
    assert (
        f"of job {job_id} were refused (HTTP 400: {UNSUPPORTED}), and it goes on: the store is away"
        in caplog.text
    )


def test_a_job_that_another_server_answers_is_not_paused(store: Store, job_id: str) -> None:
    server = Choosy(lambda _: UNSUPPORTED)
    with store.write() as tx:
        tx.exec_driver_sql("update job set succeeded = 1, failed = 0, num_rows = num_rows + 1")
    assert run(store, server, job_id).paused == {}
    assert job(store, job_id).failed == ROWS


def test_rows_of_a_job_that_is_resumed_meanwhile_are_sent_without_a_wait(store: Store, job_id: str) -> None:
    server = Choosy(lambda _: UNSUPPORTED)
    endpoint = FirstRowsEndpoint(server.endpoint(), store, [job_id])

    async def go() -> float:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        harvester = Harvester(store, endpoint, clock=loop.time, follow=True)
        working = loop.create_task(harvester.run(stop))
        while job(store, job_id).state is not JobState.PAUSED or len(harvester._flights):
            await asyncio.sleep(0.1)
        with store.write() as tx:
            catalog.move(tx, job_id, "resume", now=0.0)
        begun = loop.time()
        while job(store, job_id).state is not JobState.COMPLETED:
            await asyncio.sleep(0.1)
        stop.set()
        await working
        return loop.time() - begun

    assert virtual_time.run(go()) < 1.5 * TAKEN_BACK_S
    assert endpoint.paused == {}


@pytest.mark.parametrize(
    "words",
    [
        lambda text: None if text == "003" else UNSUPPORTED,
        lambda text: f"{UNSUPPORTED} ({text})",
    ],
    ids=["one is answered", "other words"],
)
def test_rows_that_are_at_fault_themselves_fail_alone(
    store: Store, job_id: str, words: Callable[[str], str | None]
) -> None:
    run(store, Choosy(words), job_id)
    assert job(store, job_id).state is JobState.COMPLETED


def test_a_run_says_at_its_end_which_job_it_paused(
    settings: Settings, store: Store, job_id: str, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Choosy(lambda text: None if text == "good" else UNSUPPORTED)

    def client(*_: object, **__: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(server.serve), base_url="http://server")

    task = Task(kind=Kind.PROMPT, template="{{ q }}")
    good = submit(store, str(write_input(q=["good"] * ROWS)), task).job_id
    few = submit(store, str(write_input("few.parquet", q=["bad"] * FIRST_ROWS)), task).job_id
    monkeypatch.setattr(http, "open_client", client)
    done = conserve(
        *("run", "--endpoint", "http://server", "--window", "4", "--json"), CONSERVE_HOME=str(settings.home)
    )
    said = json.loads(done.stdout)
    assert done.returncode == exits.FAILED
    assert said["jobs"] == {job_id: "paused", good: "completed", few: "completed"}
    assert list(said["refused"]) == [job_id]
    assert f"so it is paused: HTTP 400: {UNSUPPORTED.rstrip('.')}" in said["refused"][job_id]
    assert f"conserve resume {job_id}" in done.stderr


def test_jobs_of_which_rows_are_done_are_not_watched(store: Store, job_id: str) -> None:
    settings = load({"endpoint": "http://server"})
    endpoint = FakeEndpoint()
    waiting = read_jobs(settings, now=time.time())
    assert isinstance(of_first_rows(endpoint, store, settings, waiting), FirstRowsEndpoint)
    assert of_first_rows(endpoint, store, load({"endpoint": "fake:"}), waiting) is None
    with store.write() as tx:
        tx.exec_driver_sql("""update job set tags = '{"batch": "batch_1"}'""")
    assert of_first_rows(endpoint, store, settings, read_jobs(settings, now=time.time())) is None
    with store.write() as tx:
        tx.exec_driver_sql("update job set tags = null, failed = 1")
    assert of_first_rows(endpoint, store, settings, read_jobs(settings, now=time.time())) is None

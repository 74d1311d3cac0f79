"""Keys: each sees its project alone, whatever it asks for; limits are told in OpenAI's words."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing

import openai
import pytest

from conserve import hosts
from conserve.batch_api import access, serving
from conserve.batch_api.access import KeyRing
from conserve.batch_api.reads import Reads
from conserve.errors import StoreError, UsageError
from conserve.jobs.batches.admission import admit
from conserve.jobs.batches.lines import Limits
from conserve.store.books import batches, keys
from conserve.store.database.store import Store
from tests import patient, virtual_time
from tests.batch_rig import CHAT, answered, client, compute, create, lines, live, reaches
from tests.commands import conserve

Attempt = Callable[[openai.OpenAI, openai.types.Batch], object]


def make(store: Store, name: str, **named: object) -> str:
    with store.write() as tx:
        return keys.add(tx, name, **{"project": name, "now": 0.0, **named})  # type: ignore[arg-type]


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    make(store, "first")
    with live(store) as found:
        yield found


def test_only_a_key_of_the_store_is_answered(store: Store, url: str) -> None:
    key = make(store, "ann")
    for wrong in ("none", key[:-1], f"{key}x", "é", key.upper()):
        answer = patient.get(f"{url}/batches", headers=[(b"Authorization", f"Bearer {wrong}".encode())])
        assert answer.status_code == 401, wrong
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for headers in ({}, {"Authorization": key}, {"Authorization": f"Basic {key}"}):
        assert patient.get(f"{url}/files", headers=headers).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        client(url, "guess").files.list()
    assert patient.get(url.replace("/v1", "/health")).status_code == 200


CROSSINGS: dict[str, Attempt] = {
    "show a batch": lambda api, theirs: api.batches.retrieve(theirs.id),
    "cancel a batch": lambda api, theirs: api.batches.cancel(theirs.id),
    "list behind a batch": lambda api, theirs: api.batches.list(after=theirs.id),
    "show an input": lambda api, theirs: api.files.retrieve(theirs.input_file_id),
    "read an input": lambda api, theirs: api.files.content(theirs.input_file_id),
    "delete an input": lambda api, theirs: api.files.delete(theirs.input_file_id),
    "list behind an input": lambda api, theirs: api.files.list(after=theirs.input_file_id),
    "run an input": lambda api, theirs: api.batches.create(
        input_file_id=theirs.input_file_id, endpoint=CHAT, completion_window="24h"
    ),
    "show answers": lambda api, theirs: api.files.retrieve(str(theirs.output_file_id)),
    "read answers": lambda api, theirs: api.files.content(str(theirs.output_file_id)),
    "read errors": lambda api, theirs: api.files.content(str(theirs.error_file_id)),
    "delete answers": lambda api, theirs: api.files.delete(str(theirs.output_file_id)),
    "name the job": lambda api, theirs: api.batches.retrieve(theirs.to_dict()["conserve"]["job"]),  # type: ignore[index]
    "name the job's input": lambda api, theirs: api.files.content(
        f"file-{theirs.to_dict()['conserve']['job']}"  # type: ignore[index]
    ),
}


def test_no_project_reaches_anything_of_another(store: Store, url: str) -> None:
    ann, bob = (client(url, make(store, name)) for name in ("ann", "bob"))
    batch = create(ann, ["one", "REJECT"])
    reaches(ann, batch.id, "in_progress")
    compute(store)
    theirs = reaches(ann, batch.id, "completed")
    for what, attempt in CROSSINGS.items():
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as refused:
            attempt(bob, theirs)
        assert "No such" in str(refused.value), what
    assert bob.batches.list().data == []
    assert bob.files.list().data == []
    assert answered(ann, theirs.output_file_id).keys() == {"r-0"}
    assert ann.batches.retrieve(theirs.id) == theirs, "what was tried changed nothing"
    assert [job["tags"]["project"] for job in json.loads(conserve("jobs", "--json").stdout)] == ["ann"]


def test_an_idempotency_key_is_of_its_project_alone(store: Store, url: str) -> None:
    ann, bob = (client(url, make(store, name)) for name in ("ann", "bob"))
    asked = {"file": ("a.jsonl", b"a"), "purpose": "batch", "extra_headers": {"Idempotency-Key": "k"}}
    assert ann.files.create(**asked).id != bob.files.create(**asked).id  # type: ignore[arg-type]


def test_a_key_for_live_requests_alone_reaches_no_batches(store: Store, url: str) -> None:
    key = make(store, "chat", batch=False)
    with pytest.raises(openai.PermissionDeniedError, match="is for live requests"):
        client(url, key).batches.list()
    page = patient.get(url.replace("/v1", "/metrics"), headers={"Authorization": f"Bearer {key}"})
    assert page.status_code == 200, "Prometheus has one key for servers and APIs"


def test_a_revoked_key_is_refused(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "KEPT_S", 0.0)
    api = client(url, make(store, "ann"))
    assert api.files.list().data == []
    for name in ("ann", "first"):
        assert conserve("keys", "revoke", name).returncode == 0
    with pytest.raises(openai.AuthenticationError):
        api.files.list()
    assert patient.get(f"{url}/files").status_code == 401, "a store that had keys is not open again"


def test_keys_are_read_again_after_a_second(store: Store) -> None:
    async def walk() -> None:
        now_s = 0.0
        with closing(Reads(store)) as reads:
            ring = KeyRing(reads, clock=lambda: now_s)
            assert list(await ring.current()) == []
            make(store, "ann")
            now_s = access.KEPT_S / 2
            assert list(await ring.current()) == []
            now_s = access.KEPT_S
            assert [key.name for key in await ring.current()] == ["ann"]

    asyncio.run(walk())


def test_a_new_key_is_known_at_once(store: Store) -> None:
    async def walk() -> None:
        now_s = 0.0
        with closing(Reads(store)) as reads:
            ring = KeyRing(reads, clock=lambda: now_s)
            assert list(await ring.for_caller("guess")) == []
            key = make(store, "ann")
            assert list(await ring.for_caller(key)) == [], "guesses do not make the store read more"
            now_s = access.AGAIN_S
            assert [found.name for found in await ring.for_caller(key)] == ["ann"]

    asyncio.run(walk())


class TimedReads:
    """Reads that take so many seconds, as of a database that is asked in another thread, and find no key."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.count = 0

    async def rows(self, *asked: object) -> list[object]:
        self.count += 1
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return []


def test_requests_at_once_read_the_keys_once() -> None:
    async def walk() -> None:
        now_s, reads = 0.0, TimedReads(0.0)
        ring = KeyRing(reads, clock=lambda: now_s)  # type: ignore[arg-type]
        for number in (1, 2):
            await asyncio.gather(*(ring.for_caller(f"guess {n}") for n in range(20)))
            assert reads.count == number
            now_s += access.KEPT_S

    asyncio.run(walk())


def test_requests_at_once_wait_for_a_lost_database_once() -> None:
    async def walk() -> None:
        loop, reads = (
            asyncio.get_running_loop(),
            TimedReads(10.0, StoreError("the database cannot be reached")),
        )
        ring, began_s = KeyRing(reads, clock=loop.time), loop.time()  # type: ignore[arg-type]
        first = asyncio.create_task(ring.for_caller("guess"))
        await asyncio.sleep(1.0)
        first.cancel()  # its client has left
        found = await asyncio.gather(*(ring.for_caller(f"{n}") for n in range(20)), return_exceptions=True)
        assert {type(one) for one in found} == {StoreError}
        assert (reads.count, round(loop.time() - began_s)) == (1, 10)

    virtual_time.run(walk())


def test_a_request_waits_for_a_read_that_began_after_it_came() -> None:
    async def walk() -> None:
        loop, reads = asyncio.get_running_loop(), TimedReads(2.0)
        ring, began_s = KeyRing(reads, clock=loop.time), loop.time()  # type: ignore[arg-type]
        await ring.current()
        assert (reads.count, round(loop.time() - began_s)) == (1, 2)
        await asyncio.sleep(10.0)
        first = asyncio.create_task(ring.current())
        await asyncio.sleep(1.0)
        await asyncio.gather(*(ring.current() for _ in range(20)))
        assert first.done()
        assert (reads.count, round(loop.time() - began_s)) == (3, 16)

    virtual_time.run(walk())


def test_the_page_of_metrics_goes_by_the_keys_of_before_while_the_database_is_silent() -> None:
    async def walk() -> None:
        loop, reads = asyncio.get_running_loop(), TimedReads(0.0)
        ring, unread = (KeyRing(reads, clock=loop.time) for _ in range(2))  # type: ignore[arg-type]
        assert list(await ring.for_page("guess")) == []
        await asyncio.sleep(10.0)
        reads.seconds, began_s = 60.0, loop.time()
        assert list(await ring.for_page("guess")) == []
        assert round(loop.time() - began_s) == access.PAGE_S
        with pytest.raises(TimeoutError):
            await unread.for_page("guess")

    virtual_time.run(walk())


@pytest.mark.parametrize("flag", ["--limit-rows", "--limit-tokens"])
def test_a_limit_beyond_what_the_database_holds_is_refused(store: Store, flag: str) -> None:
    refused = conserve("keys", "add", "ann", flag, str(2**63))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{flag} is at most" in refused.stderr
    assert conserve("keys", "add", "ann", flag, str(2**63 - 1)).returncode == 0
    named = {flag.removeprefix("--").replace("-", "_"): 2**63}
    with pytest.raises(UsageError, match=f"^{flag} is at most 9,223,372,036,854,775,807; leave it out"):
        make(store, "ben", **named)


@pytest.mark.parametrize("flag", ["--limit-rows", "--limit-tokens"])
def test_a_limit_of_a_key_for_live_requests_alone_is_refused(store: Store, flag: str) -> None:
    refused = conserve("keys", "add", "ann", "--live", flag, "1000")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{flag} limits batches, and this key is for live requests alone" in refused.stderr
    assert conserve("keys", "add", "ann", "--live", "--batch", flag, "1000").returncode == 0


def test_a_key_has_256_random_bits_and_any_text_may_be_asked_about(store: Store) -> None:
    key = make(store, "ann")
    assert len(key) == len(keys.PREFIX) + 43, "of six bits each"
    assert key != make(store, "ben")
    with store.read() as tx:
        known = keys.everything(tx)
    found = keys.of_text(known, key)
    assert found is not None
    assert (found.name, found.hash) == ("ann", keys.hashed(key))
    for other in ("", key[:-1], "\udce9", "é"):
        assert keys.of_text(known, other) is None


def test_unfinished_rows_are_limited(store: Store, url: str) -> None:
    api = client(url, make(store, "ann", limit_rows=3))
    first = create(api, ["one", "two"])
    with pytest.raises(openai.RateLimitError) as refused:
        create(api, ["three", "four"])
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "requests")
    assert "2 of at most 3 rows are unfinished, and this file has 2" in str(refused.value)
    reaches(api, first.id, "in_progress")
    with pytest.raises(openai.RateLimitError):
        create(api, ["three", "four"])
    compute(store)
    assert create(api, ["three", "four"]).status == "validating"


def test_batches_of_one_key_are_counted_one_after_the_other(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for module, name in ((keys, "lock"), (batches, "unfinished_rows")):
        real = getattr(module, name)

        def noted(*given: object, name: str = name, real: Callable[..., object] = real) -> object:
            steps.append(name)
            return real(*given)

        monkeypatch.setattr(module, name, noted)
    create(client(url, make(store, "ann", limit_rows=3)), ["one"])
    assert steps == ["lock", "unfinished_rows"]


def test_tokens_of_a_day_are_limited(store: Store, url: str) -> None:
    api = client(url, make(store, "ann", limit_tokens=4))
    first = create(api, ["one"])
    reaches(api, first.id, "in_progress")
    compute(store)
    with pytest.raises(openai.RateLimitError, match="of 4 tokens") as refused:
        create(api, ["two"])
    assert refused.value.type == "tokens"
    with store.read() as tx:
        assert batches.tokens_since(tx, "ann", moment=1e12) == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Host": "localhost", "Origin": "http://[::1"},
        {"Origin": "null"},
        {"Host": "localhost", "X-Forwarded-For": "127.0.0.1"},
        {"Host": "localhost", "Forwarded": "for=203.0.113.9"},
    ],
)
def test_without_keys_only_this_machine_is_answered(store: Store, headers: dict[str, str]) -> None:
    with live(store) as url:
        assert client(url).files.list().data == []
        answer = patient.get(f"{url}/files", headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "keys_required"
        assert patient.get(f"{url}/files", headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_an_api_without_keys_listens_on_this_machine_alone(port: int) -> None:
    done = conserve("api", "--host", "0.0.0.0", "--port", str(port))
    assert done.returncode == 2
    assert "conserve keys add NAME" in done.stderr


def test_an_api_names_the_address_at_which_others_reach_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(hosts, "outward_address", lambda _: "192.0.2.7")
    monkeypatch.setattr(serving, "serve", lambda *_, on_ready, **__: on_ready())
    conserve("keys", "add", "nightly")
    for host, address in {"0.0.0.0": "192.0.2.7", "127.0.0.1": "127.0.0.1"}.items():
        done = conserve("api", "--host", host, "--port", str(port))
        assert done.returncode == 0
        assert f"http://{address}:{port}/v1" in done.stdout + done.stderr


def test_keys_are_made_listed_and_revoked(store: Store) -> None:
    done = conserve("keys", "add", "nightly", "--project", "search", "--batch", "--limit-rows", "10")
    key = done.stdout.strip()
    assert key.startswith(keys.PREFIX)
    assert key not in done.stderr
    (listed,) = json.loads(conserve("keys", "list", "--json").stdout)
    assert (listed["project"], listed["live"], listed["batch"]) == ("search", False, True)
    assert (listed["limit_rows"], listed["revoked_at"]) == (10, None)
    assert key.encode() not in (store.home / "conserve.db").read_bytes(), "the store has the hash alone"
    assert conserve("keys", "revoke", "nightly").returncode == 0
    assert "search" in conserve("keys", "list").stdout
    with store.read() as tx:
        assert keys.of_text(keys.everything(tx), key) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "first"), "there is or was a key 'first'"),
        (("add", "a b"), "a name is letters"),
        (("add", "a", "--project", ""), "a project is letters"),
        (("revoke", "none"), "there is no key 'none'"),
    ],
)
def test_a_mistake_is_one_sentence(store: Store, arguments: tuple[str, ...], said: str) -> None:
    make(store, "first")
    done = conserve("keys", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_batch_of_a_project_is_admitted_with_its_tag(store: Store, url: str) -> None:
    api = client(url, make(store, "ann"))
    file = api.files.create(file=("a.jsonl", lines(["a"])), purpose="batch")
    made = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    admit(store, made.id, Limits(), now=0.0)  # beside the API's own thread: one of them makes the job
    assert reaches(api, made.id, "in_progress").request_counts is not None
    assert len(json.loads(conserve("jobs", "--json").stdout)) == 1

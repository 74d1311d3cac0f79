"""Whatever is sent to the Batch API, the answer has OpenAI's form and is never a 500."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.applications import Starlette

from conserve.batch_api import openapi
from conserve.batch_api.app import ROUTES, application
from conserve.config import Settings
from conserve.jobs.batches.admission import admit
from conserve.jobs.batches.lines import Limits
from conserve.store.books import batches, uploads
from conserve.store.books.batch_state import BatchState
from conserve.store.database.store import Store
from tests.batch_rig import CHAT, lines
from tests.conftest import examples

LIMITS = Limits(file_bytes=2000, requests=5)
DOCUMENT = openapi.document(ROUTES)
ASKED = [route for route in ROUTES if not route.path.endswith("/events")]  # a stream is read as it comes
TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from([CHAT, "24h", "1d", "batch", "created_at", "asc", "10", "0", "-1", "é", "\0", "9" * 400]),
)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
GOOD = {"input_file_id": "FILE", "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b"}}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Asked"]:
    store = Store.open(Settings(home=tmp_path_factory.mktemp("routes") / "home"))
    app = application(store, LIMITS)
    yield Asked(store, app)
    app.state.conserve_api.reads.close()
    store.close()


class Asked:
    """An application that answers in this thread, with one file and one batch."""

    def __init__(self, store: Store, app: Starlette) -> None:
        self.store, self._app = store, app
        body = {"files": {"file": ("a.jsonl", lines(["a"]))}, "data": {"purpose": "batch"}}
        self.file_id = self("POST", "/v1/files", **body).json()["id"]
        self.batch_id = self("POST", "/v1/batches", json={**GOOD, "input_file_id": self.file_id}).json()["id"]

    def __call__(self, method: str, path: str, **named: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            through = httpx.ASGITransport(self._app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=through, base_url="http://localhost") as client:
                return await client.request(method, path, **named)

        return asyncio.run(send())

    def check(self, answer: httpx.Response, method: str, path: str) -> None:
        """An answer is no 500 and has the form that the description gives it."""
        assert answer.status_code < 500, answer.text
        assert answer.status_code not in (401, 403)
        name = "Error" if answer.status_code >= 400 else openapi.ANSWERS.get((method, path))
        if name is not None:
            schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
            Draft202012Validator(schema).validate(answer.json())


@hypothesis_settings(max_examples=examples(400))
@given(data=st.data())
def test_any_request_is_answered(asked: Asked, data: st.DataObject) -> None:
    send_any(asked, data)


@pytest.mark.full
@hypothesis_settings(max_examples=10_000)
@given(data=st.data())
def test_any_of_ten_thousand_requests_is_answered(asked: Asked, data: st.DataObject) -> None:
    send_any(asked, data)


def send_any(asked: Asked, data: st.DataObject) -> None:
    """Send a request that Hypothesis makes up, and check the answer."""
    route = data.draw(st.sampled_from(ASKED))
    method = data.draw(st.sampled_from(sorted((route.methods or set()) - {"HEAD"})))
    name = data.draw(st.one_of(st.sampled_from([asked.file_id, asked.batch_id]), TEXTS))
    if method == "DELETE":
        name = f"x{name}"  # the file stays
    path = route.path.replace("{id}", httpx.QueryParams({"a": name}).__str__()[2:].replace("+", "%20"))
    named: dict[str, Any] = {
        "params": data.draw(
            st.dictionaries(st.sampled_from(["limit", "after", "order", "purpose"]), TEXTS, max_size=3)
        )
    }
    if method == "POST":
        named |= data.draw(st.one_of(json_bodies(asked.file_id), forms(), st.just({}), raw_bodies()))
    asked.check(asked(method, path, **named), method, route.path)


def json_bodies(file_id: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of a batch with one or two fields of another kind, or any JSON."""
    good = {**GOOD, "input_file_id": file_id}
    changed = st.dictionaries(
        st.sampled_from([*GOOD, "output_expires_after", "other"]), DOCUMENTS, max_size=2
    )
    some = st.one_of(changed.map(lambda changes: {**good, **changes}), DOCUMENTS)
    return some.map(lambda body: {"content": json.dumps(body)})


def forms() -> st.SearchStrategy[dict[str, Any]]:
    """Forms with a file or without, and with fields of any text."""
    names = st.sampled_from(["purpose", "expires_after[anchor]", "expires_after[seconds]", "other"])
    texts = st.text(st.characters(codec="utf-8"), max_size=20)
    fields = st.dictionaries(names, st.one_of(st.sampled_from(["batch", "created_at", "3600"]), texts))
    files = st.tuples(st.text(st.characters(codec="utf-8"), max_size=10), st.binary(max_size=3000))
    return st.builds(lambda data, file: {"data": data, "files": {"file": file}}, fields, files)


def raw_bodies() -> st.SearchStrategy[dict[str, Any]]:
    """Bytes under a header that says what they are, which they are not."""
    kinds = st.sampled_from(
        ["multipart/form-data; boundary=b", "multipart/form-data", "application/json", ""]
    )
    parts = st.lists(
        st.sampled_from(
            [
                b"--b",
                b"--b--",
                b"\r\n",
                b"Content-Disposition: form-data; ",
                b'name="file"',
                b"\r\n\r\n",
                b"a",
                b"\n",
            ]
        )
    )
    contents = st.one_of(st.binary(max_size=100), parts.map(b"".join))
    return st.builds(lambda kind, body: {"headers": {"Content-Type": kind}, "content": body}, kinds, contents)


ROWS = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.one_of(st.sampled_from(["a", "b"]), DOCUMENTS),
        "method": st.one_of(st.just("POST"), DOCUMENTS),
        "url": st.one_of(st.just(CHAT), DOCUMENTS),
        "body": st.one_of(st.just({"messages": [{"role": "user", "content": "a"}]}), DOCUMENTS),
    },
)
LINES = st.one_of(ROWS.map(lambda row: json.dumps(row).encode()), st.binary(max_size=40))


@hypothesis_settings(max_examples=examples(200))
@given(content=st.lists(LINES, min_size=1, max_size=6).map(b"\n".join).filter(bool))
def test_any_file_becomes_a_job_or_is_refused_with_a_reason(asked: Asked, content: bytes) -> None:
    body = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
    uploaded = asked("POST", "/v1/files", **body)
    if len(content) > LIMITS.file_bytes:
        assert uploaded.status_code == 413
        return
    file_id = uploaded.json()["id"]
    made = asked("POST", "/v1/batches", json={**GOOD, "input_file_id": file_id}).json()["id"]
    admit(asked.store, made, LIMITS, now=0.0)
    with asked.store.read() as tx:
        found = batches.anywhere(tx, made)
        kept = uploads.get(tx, "default", file_id, now=0.0)
    assert found is not None
    assert kept is not None
    assert Path(asked.store.home / kept.path).read_bytes() == content
    assert found.state in (BatchState.IN_PROGRESS, BatchState.FAILED)
    assert (found.job is None) == bool(found.errors)
    asked.check(asked("GET", f"/v1/batches/{made}"), "GET", "/v1/batches/{id}")

"""A live Batch API for tests: uvicorn in a thread over an open store, and the files that clients send it."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import openai

from conserve.batch_api import workers
from conserve.batch_api.app import application
from conserve.batch_api.streams import Streams
from conserve.jobs.batches.lines import Limits
from conserve.store.database.store import Store
from tests import commands
from tests.commands import conserve, until
from tests.served import served

LOOK_S = 0.05
CHAT = "/v1/chat/completions"
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 4},
    "/v1/embeddings": lambda text: {"input": text},
    "/v1/responses": lambda text: {"input": text},
}


@contextmanager
def quick_looks() -> Iterator[None]:
    """Look for changes of the store twenty times a second, where it would be once."""
    with (
        patch.object(workers, "LOOK_S", LOOK_S),
        patch.dict(Streams.__init__.__kwdefaults__, {"look_s": LOOK_S}),
    ):
        yield


@contextmanager
def live(store: Store, limits: Limits | None = None) -> Iterator[str]:
    """Serve the API at a port of its own; yields its base URL."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    with quick_looks(), served(application(store, limits), listening):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


def client(url: str, key: str = "none") -> openai.OpenAI:
    """OpenAI's own client, as it comes; it is closed with the test."""
    made = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    commands.OPENED.append(made.close)
    return made


def lines(texts: Sequence[str], endpoint: str = CHAT) -> bytes:
    """A batch file that asks these things; the ids are r-0, r-1, ..."""
    rows = [
        {
            "custom_id": f"r-{number}",
            "method": "POST",
            "url": endpoint,
            "body": {"model": "any", **BODIES[endpoint](text)},
        }
        for number, text in enumerate(texts)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def create(
    api: openai.OpenAI, texts: Sequence[str], endpoint: str = CHAT, **named: Any
) -> openai.types.Batch:
    """Upload a file and make a batch of it."""
    file = api.files.create(file=("asked.jsonl", lines(texts, endpoint)), purpose="batch")
    asked: dict[str, Any] = {"endpoint": endpoint, "completion_window": "24h", **named}
    return api.batches.create(input_file_id=file.id, **asked)


def reaches(api: openai.OpenAI, batch_id: str, *states: str) -> openai.types.Batch:
    """Poll until the batch is in one of these states."""
    until(lambda: api.batches.retrieve(batch_id).status in states)
    return api.batches.retrieve(batch_id)


def compute(store: Store, *options: str) -> None:
    """Drain the queue on the fake endpoint."""
    done = conserve("--home", str(store.home), "run", "--endpoint", "fake:", *options)
    assert "Traceback" not in done.stderr, done.stderr


def answered(api: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Lines of a file of answers or errors, by their ids."""
    assert file_id is not None
    found = [json.loads(line) for line in api.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found), "a row is there twice"
    return by_id

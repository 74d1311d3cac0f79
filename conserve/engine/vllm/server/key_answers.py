"""The Batch API's answers on keys of the store, which live requests wait for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus

from conserve.engine.vllm.server.batch_connection import BatchConnections, Header, Reply
from conserve.http_server import WHO

AUTHORIZATION = b"authorization"
HERE: Header = (b"host", b"localhost")
KEPT_S = 0.5  # for which the answer on a key holds
STALE_S = 60.0  # for which it holds while the process does not answer
MOST_KEPT = 1024  # answers on keys that the store has, and as many on others
ASKING_S = 5.0  # live requests wait for the answer on their key


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKey:
    """Uses of a key that the store has."""

    live: bool
    batch: bool
    name: str = ""
    project: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAnswer:
    """The process's last answer on a key."""

    key: StoreKey | None
    at: float
    asked_at: float  # later than `at` if the process did not answer then


class Unanswered(Exception):
    """The process does not say what a key may do."""


class KeyAnswers:
    """The last answers, and questions that are under way; `asking` are connections without polls."""

    def __init__(self, asking: BatchConnections, clock: Callable[[], float] = time.monotonic) -> None:
        self._asking, self._clock = asking, clock
        self._known: dict[bytes, KeyAnswer] = {}  # apart from the others, of which any client may send many
        self._unknown: dict[bytes, KeyAnswer] = {}
        self._questions: dict[bytes, asyncio.Task[None]] = {}
        self._silent = False  # the last question had no answer

    def close(self) -> None:
        """End the questions under way."""
        for question in self._questions.values():
            question.cancel()

    async def of(self, authorization: bytes) -> StoreKey | None:
        """Uses of a key; None for a key that the store has not; raises `Unanswered` if that cannot be told.

        While the process does not answer, a request with a known key waits for no question.
        """
        told, now = self._told(authorization), self._clock()
        known = told is not None and now < told.at + STALE_S
        if told is None or not known or now >= told.asked_at + KEPT_S:
            asking = self._ask_once(authorization)
            if not (known and self._silent):
                await asyncio.shield(asking)
                told = self._told(authorization)
        if told is None or self._clock() >= told.at + STALE_S:
            raise Unanswered
        return told.key

    def _ask_once(self, authorization: bytes) -> asyncio.Task[None]:
        """The question about a key that is under way, or a new one."""
        asking = self._questions.get(authorization)
        if asking is None:
            asking = self._questions[authorization] = asyncio.create_task(self._ask(authorization))
            asking.add_done_callback(lambda _: self._questions.pop(authorization))
        return asking

    async def _ask(self, authorization: bytes) -> None:
        """Ask about a key, and keep the answer, or that there was none."""
        try:
            answer = await self._asking.get(WHO.encode(), [HERE, (AUTHORIZATION, authorization)], ASKING_S)
            key = uses(answer)
        except (OSError, ValueError, LookupError, TypeError):
            self._silent = True
            if (told := self._told(authorization)) is not None:
                self._keep(authorization, replace(told, asked_at=self._clock()))
            return
        self._silent = False
        now = self._clock()
        self._keep(authorization, KeyAnswer(key=key, at=now, asked_at=now))

    def _told(self, authorization: bytes) -> KeyAnswer | None:
        """The last answer on a key."""
        return self._known.get(authorization) or self._unknown.get(authorization)

    def _keep(self, authorization: bytes, told: KeyAnswer) -> None:
        """Keep an answer in place of the last one on this key, or of the oldest of its kind."""
        for kept in (self._known, self._unknown):
            kept.pop(authorization, None)
        kept = self._unknown if told.key is None else self._known
        if len(kept) >= MOST_KEPT:
            del kept[next(iter(kept))]
        kept[authorization] = told


def uses(answer: Reply) -> StoreKey | None:
    """Uses of a key that an answer tells, None if the store has it not; raises `ValueError` for other answers."""
    if answer.status == HTTPStatus.UNAUTHORIZED:
        return None
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"status {answer.status}")
    document = json.loads(answer.body)
    name, project = document.get("name", ""), document.get("project", "")
    return StoreKey(live=document["live"], batch=document["batch"], name=name, project=project)

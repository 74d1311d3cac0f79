"""Stock vLLM under test, seen from outside: its counters are its own metrics, less what live requests took."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from conserve.bench.answers import LoadAnswer
from conserve.bench.field import readings
from conserve.bench.served import served_model
from conserve.endpoints.window import total
from conserve.errors import EndpointUnusable
from conserve.hosts import bearer, split_login
from conserve.profiles.worth import Worth

PATH = "/metrics"
ANSWER_S = 60.0
LOOK_S = 0.5  # between two health checks


class ServedTokens(NamedTuple):
    """Tokens of the requests that a server has served since its start, live and offline ones.

    Prompts count whole: a live prompt may begin in the prefix cache, rows of random tokens share nothing.
    """

    prompts: float  # counted with the first token of the answer
    answers: float

    @property
    def all(self) -> float:
        """Tokens of both kinds."""
        return self.prompts + self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsInFlight:
    """Offline rows that a server has in flight, as far as their cost depends on them."""

    worth: Worth  # of a decode step, in prompt tokens
    context: float  # tokens that a decode step of such a row attends to, on average

    def work(self, prompts: float, answers: float) -> float:
        """Cost of these tokens, in prompt tokens."""
        return prompts + self.worth.of(answers, answers * self.context)


class StockServer:
    """A stock vLLM server under one policy; `rows` is None if it gets live requests alone."""

    def __init__(
        self,
        url: str,
        *,
        rows: RowsInFlight | None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self._rows = url, rows
        shown, login = split_login(url)
        self._client = httpx.AsyncClient(
            base_url=shown,
            headers=bearer(api_key),
            auth=login,
            timeout=ANSWER_S,
            trust_env=False,
            transport=transport,
        )

    async def model(self) -> str:
        """Name of the served model."""
        return await served_model(self._client, starts="vllm serve")

    async def counters(self) -> ServedTokens:
        """Tokens so far; raises `EndpointUnusable`."""
        try:
            answer = (await self._client.get(PATH)).raise_for_status()
        except httpx.HTTPError as error:
            raise EndpointUnusable(f"{self._client.base_url} went away ({error!r}); see its log") from error
        return tokens_of(answer.text)

    async def watch(self, start_at: float) -> list[tuple[float, ServedTokens]]:
        """Read the counters until cancelled; returns them with their times in s since `start_at`."""
        return await readings(self.counters, start_at)

    def counted(
        self,
        first: ServedTokens,
        last: ServedTokens,
        seen: Sequence[tuple[float, ServedTokens]],
        answers: Sequence[LoadAnswer],
        duration_s: float,
    ) -> dict[str, Any]:
        """Counts of a block, by the names of `Block`.

        Live tokens are those that their clients had got. vLLM does not tell how long its iterations took, nor what
        evicted rows computed again: the engine counts as busy while it has a request, which with offline rows is
        always. The first token of a row's answer counts as a decode step, and is none of the plug-in's.
        """
        counts: dict[str, Any] = {"iterations": 0, "planned": 0, "overruns": 0, "tells": False}
        if self._rows is None:
            busy_s = in_flight_s(answers, duration_s)
            return {**counts, "offline_tokens": 0, "busy_s": busy_s}
        live = live_tokens(answers, duration_s)
        prompts = max(0.0, last.prompts - first.prompts - live.prompts)
        decoded = max(0.0, last.answers - first.answers - live.answers)
        return {
            **counts,
            "offline_tokens": round(prompts + decoded),
            "offline_work": self._rows.work(prompts, decoded),
            "offline_decodes": round(decoded),
            "busy_s": duration_s,
            "offline_series": tuple(
                (at, max(0, round(tokens.all - first.all - live_tokens(answers, at).all)))
                for at, tokens in seen
            ),
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def tokens_of(page: str) -> ServedTokens:
    """Counts of vLLM's metrics page; raises `EndpointUnusable` if it has none."""
    prompts, answers = total(page, "vllm:prompt_tokens_total"), total(page, "vllm:generation_tokens_total")
    if prompts is None or answers is None:
        raise EndpointUnusable("the stock server's /metrics counts no tokens; leave --disable-log-stats out")
    return ServedTokens(prompts, answers)


def live_tokens(answers: Sequence[LoadAnswer], until_s: float) -> ServedTokens:
    """Tokens of live requests that their clients had got by then, each prompt with its first token."""
    begun = [one for one in answers if one.token_at_s and one.token_at_s[0] <= until_s]
    got = sum(at <= until_s for one in begun for at in one.token_at_s)
    return ServedTokens(float(sum(one.input_tokens for one in begun)), float(got))


def in_flight_s(answers: Sequence[LoadAnswer], duration_s: float) -> float:
    """Seconds of the block in which at least one of these requests was in flight."""
    busy_s, until_s = 0.0, 0.0
    for one in sorted(answers, key=lambda answer: answer.sent_s):
        start_s, end_s = max(one.sent_s, until_s), min(one.ended_s, duration_s)
        busy_s += max(0.0, end_s - start_s)
        until_s = max(until_s, end_s)
    return busy_s


async def until_ready(url: str, *, within_s: float) -> None:
    """Wait until a server answers its health check again; raises `EndpointUnusable` after `within_s`."""
    async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
        for _ in range(max(1, round(within_s / LOOK_S))):
            try:
                if (await client.get("/health")).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(LOOK_S)
    raise EndpointUnusable(f"{url} does not answer {within_s:.0f} s after its turn began; see its log")

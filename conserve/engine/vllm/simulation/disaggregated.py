"""Prefill and decode on engines of their own, with live requests first on each: DistServe with priorities.

Each engine is vLLM's scheduler on simulated time. A prompt runs on the prefill engine with the fewest tokens before
it, which also gives the first token; the rest of the answer runs on the decode engine with the fewest tokens. KV is
handed over in no time, which flatters. It stays in the prefill engine's memory until the decode engine has room
(back-pressure), and a row that loses its memory on a decode engine computes its prompt there again.

Source: DistServe (Zhong et al., OSDI 2024); as DistServe-P in ConServe (2026), section 6.1.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from conserve.engine.known_times import KnownTimes
from conserve.engine.section import EngineSection
from conserve.engine.vllm.requests.data_parallel import together
from conserve.engine.vllm.simulation.bare import bare_config
from conserve.engine.vllm.simulation.engine import IDLE_S, TOKEN, Coming, SimulatedAnswer, SimulatedEngine
from conserve.engine.vllm.simulation.handover import HandOver


@dataclass(slots=True, eq=False)
class Passage:
    """A request on its way through a prefill and a decode engine."""

    prompt: int | Sequence[int]  # tokens, or their number
    answer_tokens: int
    answer: SimulatedAnswer | None  # None for an offline row

    @property
    def offline(self) -> bool:
        """True for a row."""
        return self.answer is None

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        prompt = self.prompt if isinstance(self.prompt, int) else len(self.prompt)
        return prompt + self.answer_tokens


class GivenRequest(NamedTuple):
    """A request for an engine, at a moment that may be to come."""

    at_s: float
    number: int
    request: Request


class PoolEngine(SimulatedEngine):
    """An engine of a pool. It has a time of its own, on which the pool's clock stands during its steps."""

    def __init__(self, config: Any, **arguments: Any) -> None:
        super().__init__(config, offline=iter(()), window=0, **arguments)
        self.now = self.clock.now
        self.load = 0  # tokens of all requests
        self.connector: HandOver = self.scheduler.connector
        self.connector.taken = self._taken
        self.senders: dict[str, tuple[PoolEngine, str]] = {}  # of KV that is to come: engine, and name there
        self._passages: dict[str, tuple[Passage, Request]] = {}
        self._given: list[GivenRequest] = []
        self._numbers_given = count()
        self._sent: set[str] = set()  # requests whose KV another engine has got

    def give(self, passage: Passage, at_s: float, *, computed: Sequence[int] | None = None) -> Request:
        """Queue a prompt for its first token, or, of a prompt that is `computed`, the rest of the answer."""
        prompt = passage.prompt if computed is None else [*computed, TOKEN]
        answer_tokens = 1 if computed is None else passage.answer_tokens - 1
        request = self.request(prompt, answer_tokens, offline=passage.offline)
        request.arrival_time = at_s if passage.answer is None else passage.answer.arrived_s
        self._passages[request.request_id] = passage, request
        self.load += passage.tokens
        if computed is not None:
            self.connector.brought[request.request_id] = len(computed)
        elif passage.answer_tokens > 1:
            self.connector.leaving.add(request.request_id)
        heapq.heappush(self._given, GivenRequest(at_s, next(self._numbers_given), request))
        return request

    def _taken(self, name: str) -> None:
        """Have the sender free the blocks of a request whose KV has come."""
        sender, name_there = self.senders.pop(name)
        sender._sent.add(name_there)

    def step(self, next_s: float) -> list[tuple[Passage, Request]]:
        """Run an iteration; returns what has finished here. Without any work let time pass, until `next_s`."""
        self.clock.now = self.now
        while self._given and self._given[0].at_s <= self.now:
            self.scheduler.add_request(heapq.heappop(self._given).request)
        output = self.schedule()
        if not output.num_scheduled_tokens:
            coming = self._given[0].at_s if self._given else inf
            later = min(next_s, coming)
            self.clock.now = max(self.now + IDLE_S, later if later < inf else 0.0)
        result = self.result(output)
        if self._sent:
            result.kv_connector_output = KVConnectorOutput(finished_sending=self._sent)
            self._sent = set()
        finished = list(self._settle(output, result))
        self.now = self.clock.now
        return finished

    def _settle(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> Iterator[tuple[Passage, Request]]:
        """Note the tokens of live requests; yield the requests that have finished."""
        for outputs in self.scheduler.update_from_output(output, result).values():
            for answer in outputs.outputs:
                passage, request = self._passages[answer.request_id]
                if passage.answer is not None:
                    passage.answer.token_at_s += [self.clock.now] * len(answer.new_token_ids)
                if answer.finish_reason is not None:
                    del self._passages[answer.request_id]
                    self.load -= passage.tokens
                    yield passage, request


class Disaggregated:
    """A pool of prefill and decode engines."""

    def __init__(
        self,
        prefill: Sequence[PoolEngine],
        decode: Sequence[PoolEngine],
        *,
        offline: Iterator[tuple[int, int]],
        window: int,
    ) -> None:
        """`offline`: tokens of prompts and answers, of which `window` rows for each decode engine are in the pool.

        With more of them the memory of the prefill engines would fill with KV that no decode engine has room for.
        """
        self._prefill, self._decode = prefill, decode
        self._stages = [*prefill, *decode]
        self._clock = prefill[0].clock
        self._offline, self._window = offline, window * len(decode)
        self._due: deque[tuple[float, Passage]] = deque()
        self._answers: list[SimulatedAnswer] = []
        self._rows = 0  # in the pool
        self._first_steps = 0  # decode steps of rows that count as tokens of a prompt
        self.said: dict[str, Any] = {}
        self.said_s = 0.0  # time of that report

    @property
    def now(self) -> float:
        """Time that all engines have reached."""
        return min(stage.now for stage in self._stages)

    def report(self) -> dict[str, Any]:
        """The report of all engines' schedulers."""
        self._clock.now = self.now
        said = together([stage.scheduler.conserve() for stage in self._stages])
        said["offline"]["decode_steps"] += self._first_steps
        return said

    def play(
        self, arrivals: Iterable[Coming], block_s: float, *, shared_tokens: int = 0
    ) -> list[SimulatedAnswer]:
        """Play these requests from now on; returns when all are answered and `block_s` are over.

        The first `shared_tokens` of their prompts are the same. `said` is the report when the block's time is over.
        """
        began = self.now
        for arrival in arrivals:
            answer = SimulatedAnswer(began + arrival.at_s)
            prompt = self._prefill[0]._prompt(arrival, shared_tokens)
            self._due.append((answer.arrived_s, Passage(prompt, arrival.output_tokens, answer)))
            self._answers.append(answer)
        wanted = sum(passage.answer_tokens for _, passage in self._due)
        self.go_on_until(began + block_s)
        self.said, self.said_s = self.report(), self.now
        while sum(len(answer.token_at_s) for answer in self._answers) < wanted:
            self._step(inf)
        answers, self._answers = self._answers, []
        return answers

    def go_on_until(self, moment: float) -> None:
        """Run all engines until this moment of simulated time."""
        while self.now < moment:
            self._step(moment)

    def _step(self, until: float) -> None:
        """Run an iteration of the engine that is behind all others: no other can give it anything earlier."""
        stage = min(self._stages, key=lambda one: one.now)
        self._bring(stage.now)
        givers = self._decode if stage in self._prefill else self._prefill  # of memory, and of KV
        others = min(one.now for one in givers)
        coming = self._due[0][0] if self._due else inf
        for passage, request in stage.step(min(others, coming, until)):
            if stage in self._prefill and passage.answer_tokens > 1:
                self._hand_over(stage, passage, request)
            elif passage.offline:
                self._rows -= 1

    def _bring(self, now: float) -> None:
        """Give prefill engines the live requests that are due by now, and new rows in place of finished ones."""
        while self._due and self._due[0][0] <= now:
            at_s, passage = self._due.popleft()
            least(self._prefill).give(passage, at_s)
        while self._rows < self._window and (lengths := next(self._offline, None)) is not None:
            self._rows += 1
            least(self._prefill).give(Passage(*lengths, None), now)

    def _hand_over(self, sender: PoolEngine, passage: Passage, request: Request) -> None:
        """Have a decode engine go on with a request whose prompt is computed."""
        receiver = least(self._decode)
        computed = request.prompt_token_ids or []
        going_on = receiver.give(passage, sender.now, computed=computed)
        self._first_steps += passage.offline
        receiver.senders[going_on.request_id] = (sender, request.request_id)


def least(stages: Sequence[PoolEngine]) -> PoolEngine:
    """The engine with the fewest tokens."""
    return min(stages, key=lambda stage: stage.load)


def handing_over(
    folder: Path, section: EngineSection, times: KnownTimes, flags: Mapping[str, int]
) -> VllmConfig:
    """Configuration of an engine of a pool."""
    connector = KVTransferConfig(
        kv_connector=HandOver.__name__, kv_connector_module_path=HandOver.__module__, kv_role="kv_both"
    )
    return bare_config(folder, section=section, times=times, kv_transfer_config=connector, **flags)

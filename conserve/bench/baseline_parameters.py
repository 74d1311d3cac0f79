"""Parameters of the baselines, tuned to the workload as their authors do: by simulated test runs.

A test run on two cores takes about a minute, and the searches take 25 of them: longer than the comparison. So test
runs are simulated by default; `measured_run` is one on the engine, as in HyGen's paper.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from conserve.bench.compare import one_turn
from conserve.bench.deployment import Deployment
from conserve.bench.field import Field
from conserve.bench.measure import Block
from conserve.bench.names import ONLINE_ONLY_PLANNED, SARATHI_P
from conserve.bench.offline import lengths_of
from conserve.bench.presets import Preset
from conserve.bench.simulate_online import EngineModel, Request, play, share_of
from conserve.bench.simulate_with_rows import Sharing, play_with_rows
from conserve.bench.sizing import Sized
from conserve.bench.slo_search import Promise, RunLatencies, excess, search
from conserve.bench.traces import Trace
from conserve.errors import InputError
from conserve.names import HYGEN, HYGEN_STAR
from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LinearModel, smallest_ms

ROWS = 512  # different rows of a simulation, over and over
LEAST_TOKENS = 128  # of an iteration
LEAST_ROWS_PER_S = 0.01
ALONE = ONLINE_ONLY_PLANNED  # test runs are all on the server that can be switched
TERMS = {HYGEN: "budget_ms", HYGEN_STAR: "offline_per_s"}  # parameter of each policy
TOKENS = "tokens"  # of an iteration, which `hygen-star` has beside its rate


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningWorkload:
    """Live requests and rows of a comparison, for test runs on an engine's model: those of one of several."""

    engine: EngineModel
    traces: Sequence[Trace | None]  # of the rounds
    block_s: float
    lengths: Sequence[tuple[int, int]]  # tokens of rows and their answers
    window: int  # rows in the engine

    @classmethod
    def of(cls, sized: Sized, preset: Preset, engine: EngineModel, seed: int) -> "TuningWorkload":
        """The workload that a comparison of this size plays."""
        return cls(
            engine=replace(engine, engines=1),
            traces=[share_of(_trace(sized, one), engine.engines) for one in range(sized.design.rounds)],
            block_s=sized.design.block_s,
            lengths=list(islice(lengths_of(preset, seed), ROWS)),
            window=max(1, (preset.offline_window or engine.most_rows) // engine.engines),
        )

    @property
    def fullest(self) -> Batch:
        """A full iteration: a whole chunk of a prompt beside a decode step of each place, with long contexts."""
        context = max(map(sum, self.lengths))
        steps = [Slice(1, context, True) for _ in range(self.engine.max_requests)]
        return Batch.of([Slice(self.engine.max_tokens, context), *steps])

    def alone(self) -> RunLatencies:
        """Latencies without rows."""
        return _latencies(
            one for trace in self.traces for one in play(trace, self.engine, self.block_s).requests
        )

    def beside(self, sharing: Sharing) -> tuple[RunLatencies, float]:
        """Latencies beside rows, and the rows' tokens per second."""
        found = [
            play_with_rows(trace, self.engine, self.block_s, sharing, self.lengths, window=self.window)
            for trace in self.traces
        ]
        tokens = sum(one.offline_tokens for one in found)
        return _latencies(one for block in found for one in block.requests), tokens / self.block_s / len(
            found
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Sarathi's token budget for a workload, and the ones it was chosen from."""

    tokens: int
    tried: Sequence[int]
    kept: bool

    def sentence(self) -> str:
        """Line for the user."""
        others = ", ".join(map(str, self.tried))
        why = (
            "the most rows within the tolerance"
            if self.kept
            else "none keeps the tolerance, this one exceeds it least"
        )
        return f"{SARATHI_P}: {self.tokens} tokens an iteration, of {others} ({why}, simulated)"


def token_budget(
    workload: TuningWorkload,
    promised: Sequence[Promise],
    *,
    beside: Callable[[int], tuple[RunLatencies, float]] | None = None,
    alone: RunLatencies | None = None,
) -> TokenBudget:
    """Token budget with the most rows that keeps the promises, else the one nearest to that.

    `beside` is a test run with a budget, which returns latencies beside rows and the rows' rate, and `alone` has
    the latencies without rows: those of the simulation by default, whose rate is of tokens.
    """

    def simulated(tokens: int) -> tuple[RunLatencies, float]:
        return workload.beside(Sharing(online_first=False, max_tokens=tokens))

    tried = budgets(workload.engine)
    run, alone, scores = beside or simulated, alone or workload.alone(), []
    for tokens in tried:
        found, rate = run(tokens)
        over = excess(found, alone, promised)
        scores.append((over <= 1, rate if over <= 1 else -over, tokens))
    kept, _, tokens = max(scores)
    return TokenBudget(tokens=tokens, tried=tried, kept=kept)


def budgets(engine: EngineModel) -> list[int]:
    """Token budgets to try on an engine."""
    least, most = max(LEAST_TOKENS, engine.max_requests), engine.max_tokens
    return sorted({least, most, *(size for size in _doublings(LEAST_TOKENS, most) if least <= size)})


class TunedTerms(NamedTuple):
    """Parameters of a policy of HyGen's, by the names of `RowTerms`."""

    values: Mapping[str, float]
    kept: bool  # False: no test run keeps the promises, and the one with these exceeds them least
    runs: int

    @property
    def tokens(self) -> int:
        """The token budget; only `hygen-star` has one."""
        return int(self.values[TOKENS])


TermsRun = Callable[[Mapping[str, float]], Awaitable[tuple[RunLatencies, float]]]
"""Plays the live requests with these parameters; returns latencies beside rows, and the rows' rate in any unit."""


async def tuned_terms(
    policy: str,
    workload: TuningWorkload,
    predictor: LinearModel,
    promised: Sequence[Promise],
    run: TermsRun | None,
    alone: RunLatencies,
    *,
    tokens: Sequence[int] = (),
) -> TunedTerms:
    """Parameters of a policy of HyGen's, searched with `run`, or with simulated test runs.

    The parameter in `TERMS` is searched; for `hygen-star` at each of `tokens`, by default all token budgets that
    suit the engine: chunks of prompts add to gaps whatever the rate, and its authors choose their size. Of the test
    runs that keep the promises the one with the most rows is taken, else the one that exceeds them least; of equal
    ones that with the smallest value.
    """
    run = run or _simulated(policy, workload, predictor)
    low, high = await asyncio.to_thread(_range, policy, workload, predictor)
    tried: list[tuple[bool, float, Mapping[str, float]]] = []

    async def latencies(value: float, terms: Mapping[str, float]) -> RunLatencies:
        given = {TERMS[policy]: value, **terms}
        found, rate = await run(given)
        over = excess(found, alone, promised)
        tried.append((over <= 1, rate if over <= 1 else -over, given))
        return found

    rated = policy == HYGEN_STAR
    for terms in [{TOKENS: size} for size in tokens or budgets(workload.engine)] if rated else [{}]:
        await search(low, high, partial(latencies, terms=terms), alone, promised)
    kept, _, values = max(tried, key=lambda one: (*one[:2], -one[2][TERMS[policy]]))
    return TunedTerms(values, kept, len(tried))


def sentence(policy: str, found: TunedTerms, promised: Sequence[Promise], how: str) -> str:
    """Line for the user on tuned parameters of HyGen's."""
    value = found.values[TERMS[policy]]
    said = f"{value:,.0f} ms an iteration"
    if policy == HYGEN_STAR:
        said = f"{value:.3g} rows/s in iterations of at most {found.tokens} tokens"
    kept = "" if found.kept else ", which none keeps and this exceeds least"
    return f"{policy}: {said} for {', '.join(map(str, promised))}{kept} ({found.runs} test runs, {how})"


async def tuned_hygen(
    playing: Field,
    deployment: Deployment,
    workload: TuningWorkload,
    sized: Sized,
    promised: Sequence[Promise],
    *,
    measures: bool,
) -> list[str]:
    """Find the parameters of HyGen's policies, and give them to the deployment; returns a sentence on each.

    With `measures` every test run is a block on the engine, otherwise a simulated one. The token budget of
    `hygen-star` is chosen by simulated ones in either case: five searches on the engine would take an hour.
    """
    named, said = [name for name in (HYGEN_STAR, HYGEN) if name in sized.design.policies], []
    if not named:
        return []
    if measures:
        alone = RunLatencies.heard((await measured(playing, sized, ALONE)).answers).as_reference()
    else:
        alone = workload.alone()
    how = "on the engine" if measures else "simulated"
    for policy in named:
        predictor = await deployment.hygen_model() or workload.engine.model
        tuned = partial(tuned_terms, policy, workload, predictor, promised)
        if not measures:
            found = await tuned(None, alone)
        else:
            chosen = [(await tuned(None, workload.alone())).tokens] if policy == HYGEN_STAR else []
            run = measured_run(playing, deployment, sized, policy)
            found = await tuned(run, alone, tokens=chosen)
        deployment.terms[policy] = found.values
        said.append(sentence(policy, found, promised, how))
    return said


def measured_run(playing: Field, deployment: Deployment, sized: Sized, policy: str) -> TermsRun:
    """Test run on the engine itself: a block of the first round's arrivals under this policy."""

    async def run(terms: Mapping[str, float]) -> tuple[RunLatencies, float]:
        deployment.terms[policy] = terms
        block = await measured(playing, sized, policy)
        return RunLatencies.heard(block.answers), block.offline_work / block.engine_s

    return run


async def measured(playing: Field, sized: Sized, policy: str) -> Block:
    """Play a block that counts for nothing else."""
    return await one_turn(playing, policy, None, sized.source(0), sized.design)


def _range(policy: str, workload: TuningWorkload, predictor: LinearModel) -> tuple[float, float]:
    """Least and largest value of a policy's parameter.

    HyGen's budget in ms is between the smallest iteration and the longest one, which no budget cuts. The rate of
    `hygen-star` in rows/s is at most as many as the engine answers.
    """
    if policy == HYGEN:
        low = smallest_ms(predictor)
        return low, max(2 * low, predictor.predict(workload.fullest))
    _, tokens_per_s = workload.beside(_full(workload))
    row = sum(map(sum, workload.lengths)) / len(workload.lengths)
    return LEAST_ROWS_PER_S, max(2 * LEAST_ROWS_PER_S, tokens_per_s / row)


def _simulated(policy: str, workload: TuningWorkload, predictor: LinearModel) -> TermsRun:
    full = _full(workload)

    async def run(terms: Mapping[str, float]) -> tuple[RunLatencies, float]:
        if policy == HYGEN:
            sharing = replace(full, budget_ms=terms[TERMS[HYGEN]], predictor=predictor)
        else:
            sharing = replace(full, rows_per_s=terms[TERMS[HYGEN_STAR]], max_tokens=int(terms[TOKENS]))
        return await asyncio.to_thread(workload.beside, sharing)

    return run


def _full(workload: TuningWorkload) -> Sharing:
    """Rows in every iteration, as many tokens as it takes."""
    return Sharing(online_first=True, max_tokens=workload.engine.max_tokens)


def _trace(sized: Sized, number: int) -> Trace | None:
    try:
        return sized.source(number)
    except InputError:  # no arrival is left at this rate
        return None


def _latencies(requests: Iterable[Request]) -> RunLatencies:
    answered = [one for one in requests if one.token_at_s]
    ttft_ms = np.array([(one.token_at_s[0] - one.at_s) * 1e3 for one in answered], dtype=np.float64)
    gaps_s = [np.diff(one.token_at_s) for one in answered]
    return RunLatencies(ttft_ms, np.concatenate([np.zeros(0), *gaps_s]) * 1e3)


def _doublings(least: int, most: int) -> list[int]:
    return [least << power for power in range(int(np.log2(max(1.0, most / least))) + 1)]

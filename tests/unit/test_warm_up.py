"""The warm-up of `--profile auto` leaves a model, however slow the engine is."""

import asyncio
import random
import re
import statistics
from functools import cache

import pytest

from conserve import variables
from conserve.engine.vllm.profiling.warm_up import (
    FLOOR_TOKENS,
    GROUP_SHARE,
    GROWTH,
    LEAST_PREFILLS,
    LEAST_SAMPLES,
    LONGEST_PROMPT,
    WARM_UP_S,
    Growth,
    WarmUp,
    WarmUpGroup,
    grow,
    seconds_asked_for,
)
from conserve.errors import SettingsError
from conserve.profiles.batch import Batch, Slice
from tests.fake_rig import TRUTH, slower
from tests.unit.test_slow_engines import OTHERS, SLOWNESS

CHUNK = 2048


class FakeEngine:
    """Serves groups in simulated time as vLLM schedules them, and shows a warm-up its iterations."""

    def __init__(self, slowness: float) -> None:
        self.truth, self.warm_up, self.now_s = slower(TRUTH, slowness), WarmUp(), 0.0
        self.groups: list[WarmUpGroup] = []
        self.longest_ms = 0.0
        self.sentences: list[str] = []
        self._dice = random.Random(2)

    def clock(self) -> float:
        return self.now_s

    async def serve(self, group: WarmUpGroup) -> None:
        self.groups.append(group)
        computed, generated = [0] * len(group.prompts), [0] * len(group.prompts)
        while any(n < most for n, most in zip(generated, group.answers, strict=True)):
            left, slices = CHUNK, []
            for number, prompt in enumerate(group.prompts):
                if generated[number] == group.answers[number]:
                    continue
                decode = computed[number] >= prompt
                tokens = 1 if decode else min(left, prompt - computed[number])
                if tokens > 0:
                    slices.append(Slice(tokens, computed[number], decode))
                    left -= tokens
                    computed[number] += tokens
                    generated[number] += computed[number] >= prompt
            self._iterate(Batch.of(slices))

    def _iterate(self, batch: Batch) -> None:
        ms = self.truth.predict(batch) * self._dice.gauss(1, 0.01)
        self.longest_ms = max(self.longest_ms, ms)
        self.now_s += ms / 1e3
        self.warm_up.add(batch, ms)


def test_the_user_may_ask_for_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_asked_for() == WARM_UP_S
    monkeypatch.setenv(variables.WARM_UP_S, "2.5")
    assert seconds_asked_for() == 2.5


@pytest.mark.parametrize("asked", ["0", "-1", "nan", "inf", "soon", ""])
def test_what_is_no_time_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.WARM_UP_S, asked)
    with pytest.raises(SettingsError) as refused:
        seconds_asked_for()
    assert str(refused.value) == (
        f"CONSERVE_WARM_UP_S takes seconds above 0, not {asked!r}; leave it out for 12"
    )


@cache
def warmed_up(engine: str, seconds: float = WARM_UP_S) -> FakeEngine:
    fake = FakeEngine(SLOWNESS[engine])
    growth = Growth(seconds=seconds, longest=LONGEST_PROMPT, most=128)
    asyncio.run(grow(growth, fake.serve, seconds=seconds, say=fake.sentences.append, clock=fake.clock))
    return fake


@pytest.mark.parametrize("seconds", [WARM_UP_S, 1.0])
@pytest.mark.parametrize("engine", SLOWNESS)
def test_a_warm_up_ends_with_a_model_however_slow_the_engine(engine: str, seconds: float) -> None:
    fake = warmed_up(engine, seconds)
    model = fake.warm_up.fitted()
    assert model is not None
    near = {p: fake.truth.predict(p.batch) for p in OTHERS if all(s.context < 256 for s in p.slices)}
    off = [abs(model.predict(p.batch) / ms - 1) for p, ms in near.items() if ms <= fake.longest_ms]
    assert statistics.mean(off) < 0.05
    assert max(off) < 0.2


@pytest.mark.parametrize("seconds", [WARM_UP_S, 1.0])
@pytest.mark.parametrize("engine", SLOWNESS)
def test_a_longer_warm_up_is_announced_once(engine: str, seconds: float) -> None:
    fake = warmed_up(engine, seconds)
    largest_group_s = max(seconds * GROUP_SHARE, 2 * fake.longest_ms / 1e3)
    if not fake.sentences:
        assert fake.now_s < seconds + largest_group_s
        return
    (sentence,) = fake.sentences
    more_s = float(re.search(r"about (\d+) s more", sentence).group(1))  # type: ignore[union-attr]
    assert fake.now_s < seconds + 1.5 * more_s + 2 * largest_group_s


def test_a_fast_engine_warms_up_in_time_with_prompts_of_all_sizes() -> None:
    for engine in ("1x", "5x"):
        fake = warmed_up(engine)
        assert fake.sentences == []
        assert max(group.tokens for group in fake.groups) > 2048
    assert len(warmed_up("1x").groups) > 50


def test_small_requests_come_first_and_long_prompts_only_if_they_are_affordable() -> None:
    for engine in SLOWNESS:
        groups = warmed_up(engine).groups
        assert groups[0].tokens <= 16
        largest = 0
        for group in groups[1:]:
            largest = max(largest, groups[groups.index(group) - 1].tokens)
            assert group.tokens <= max(GROWTH * largest, 8 * len(group.prompts))
    assert max(group.tokens for group in warmed_up("100x").groups) <= FLOOR_TOKENS


def test_every_engine_behind_one_server_gets_enough() -> None:
    growth = Growth(seconds=WARM_UP_S, longest=LONGEST_PROMPT, most=128, engines=3)
    served: list[WarmUpGroup] = []
    while growth.missing:
        group = growth.next()
        served.append(group)
        growth.served(group, 0.1)
    assert len(served) >= 3 * LEAST_PREFILLS
    assert sum(group.iterations for group in served) >= 3 * LEAST_SAMPLES


def test_decode_steps_alone_make_no_model_and_the_next_prompts_do() -> None:
    warm_up = WarmUp()
    for n in range(10 * LEAST_SAMPLES):
        batch = Batch.of([Slice(1, 100 + n, True)])
        warm_up.add(batch, TRUTH.predict(batch))
    assert warm_up.fitted() is None
    for n in range(LEAST_PREFILLS):
        batch = Batch.of([Slice(16 * (n + 1), 0)])
        warm_up.add(batch, TRUTH.predict(batch))
    model = warm_up.fitted()
    assert model is not None
    assert model.predict(Batch.of([Slice(200, 0)])) == pytest.approx(
        TRUTH.predict(Batch.of([Slice(200, 0)])), rel=0.05
    )


def test_groups_are_served_together_and_told_of_once() -> None:
    """So that an engine that schedules ahead is hardly ever idle, which its iterations' times would show."""
    served, most, now, said = 0, 0, 0.0, list[str]()

    async def serve(group: WarmUpGroup) -> None:
        nonlocal served, most, now
        served += 1
        most = max(most, served)
        await asyncio.sleep(0)
        now += 5.0  # slow
        served -= 1

    growth = Growth(seconds=2.0, longest=LONGEST_PROMPT, most=128)
    asyncio.run(grow(growth, serve, seconds=2.0, say=said.append, clock=lambda: now, together=2))
    assert most == 2
    assert len(said) == 1
    assert not growth.missing

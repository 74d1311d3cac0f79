"""Sums of decode steps are what adding the steps one by one gives."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from conserve.engine.policy.decode_sums import Steps
from conserve.engine.policy.kv_groups import KvGroup, blocks_lacking
from conserve.engine.policy.view import Candidate
from conserve.profiles.batch import Batch

BLOCK = 16
PROMPT = Candidate("prompt", 30, 0)
STEPS = st.lists(
    st.builds(
        lambda number, tokens, context, lacking: Candidate(
            f"row{number}", tokens, context, True, max(0, context // BLOCK - lacking)
        ),
        st.integers(0, 10**6),
        st.sampled_from([1, 1, 1, 3]),
        st.integers(1, 200),
        st.integers(-1, 2),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)
GROUPS = st.sampled_from([(), (KvGroup(BLOCK), KvGroup(BLOCK, kept_tokens=32))])


@given(STEPS, GROUPS, st.integers(0, 12))
def test_sums_are_those_of_the_first_steps_one_by_one(
    requests: list[Candidate], groups: tuple[KvGroup, ...], prompts: int
) -> None:
    among = [request for one in requests for request in [*[PROMPT] * (prompts % 3), one]] + [PROMPT] * prompts
    steps = Steps(among, groups, BLOCK)
    for count in range(len(requests) + 1):
        assert steps.has(count)
        first = requests[:count]
        blocks = sum(blocks_lacking(one, one.tokens, groups, BLOCK) for one in first)
        assert steps.tokens(count) == sum(one.tokens for one in first)
        assert steps.blocks(count) == blocks
        assert steps.named(count) == {one.name: one.tokens for one in first}
        batch, one_by_one = Batch(requests=1, tokens=5), Batch(requests=1, tokens=5)
        steps.add_to(batch, count)
        for one in first:
            one_by_one.add(one.tokens, one.context, one.decode)
        assert batch == one_by_one == batch.copy()
    assert not steps.has(len(requests) + 1)
    assert len(steps) == len(requests)


def test_a_copy_has_all_sums_and_is_added_to_apart() -> None:
    batch = Batch(**{field.name: number for number, field in enumerate(fields(Batch), 1)})
    copied = batch.copy()
    assert copied == batch
    copied.add(1, 1)
    assert copied != batch

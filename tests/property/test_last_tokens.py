"""Times of last tokens, kept together and apart, beside a dict with a time for each request."""

from collections import Counter

from hypothesis import event, given
from hypothesis import strategies as st

from conserve.engine.policy.view import DEFAULT_CLASS
from conserve.engine.runtime.last_tokens import LastTokens

NAMES = ("a", "b", "c", "d")
CLASS_OF = {"b": "chat", "c": "chat"}
STEPS = st.one_of(
    st.tuples(st.just("go on"), st.lists(st.sampled_from((*NAMES, "row")), unique=True, max_size=5)),
    st.just(("again", [])),
    st.just(("again", [])),
    st.tuples(st.sampled_from(("begin", "end")), st.lists(st.sampled_from(NAMES), min_size=1, max_size=1)),
)


@given(st.lists(STEPS, min_size=10, max_size=40))
def test_gaps_are_those_of_a_time_for_each_request(steps: list[tuple[str, list[str]]]) -> None:
    last, times, newest = LastTokens(), dict[str, float](), list[str]()
    gaps = repeated = 0
    for at, (what, names) in enumerate(steps):
        if what == "begin":
            last.begin(names[0], at)
            times[names[0]] = at
        elif what == "end":
            assert last.end(names[0]) == (times.pop(names[0], None) is not None)
        else:
            newest = [*newest] if what == "again" else names
            known = [name for name in newest if name in times]
            expected = Counter((times[name], CLASS_OF.get(name, DEFAULT_CLASS)) for name in known)
            found = {(one.last, one.live_class): one.requests for one in last.go_on(newest, CLASS_OF, at)}
            assert found == expected
            gaps, repeated = gaps + bool(known), repeated + bool(known and what == "again")
            times.update(dict.fromkeys(known, at))
        assert len(last) == len(times)
        assert all((name in last) == (name in times) for name in NAMES)
    event(f"gaps: {gaps > 0}, of the same requests again: {repeated > 0}")

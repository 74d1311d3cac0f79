"""Views and plans in a file: views that are read back are planned the same, and a slow disk harms no request."""

import json
import logging
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from conserve.engine.policy.conserve import Conserve
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.policies import POLICIES
from conserve.engine.policy.recorded import BY_CLASS, NEWEST, READ_ON, VERSION, line_of, read, recorded
from conserve.engine.policy.view import DEFAULT_CLASS, Candidate, Image, Lazy, Slo
from conserve.engine.runtime.recording import MOST_QUEUED, LineAppender
from conserve.profiles.batch import Batch
from conserve.profiles.correction import CorrectedModel, FrozenModel
from conserve.profiles.margin import Residual
from conserve.profiles.model import TIMELESS
from tests.policy_views import FRESH, MS_PER_TOKEN, ROW, decodes, view_of

IMAGES = (Image(7, 12.5), Image(30, 12.5))
SHARED = [b"a", b"ab", b"abc"]
BUSY: dict[str, Any] = {
    "online": [*decodes(2), Candidate("prompt", 300, 16, age_ms=12.5)],
    "offline": decodes(3, "row"),
    "waiting_online": [Candidate("first", 40, 0, age_ms=0.1, surcharge_ms=0.25)],
    "waiting_offline": [
        ROW._replace(prefix=SHARED, context=16),
        FRESH._replace(prefix=[*SHARED[:2], b"abd", b"abde"]),
        Candidate("third", 5, 0),
    ],
    "waiting_with_blocks": [Candidate("held", 1, 64, blocks=4, saved=True)],
    "coming": frozenset([b"ab", ("row", 7)]),
    "slo": Slo(ttft_ms=1500.0),
    "reserved_blocks": 3,
}


def through(view: Any, plan: Any = None) -> Any:
    return recorded(line_of(view, plan, policy="conserve", at=12.75))


def test_a_line_is_the_view_again() -> None:
    view, seen = view_of(**BUSY), through(view_of(**BUSY)).view
    for name in ("online", "offline", "waiting_online", "waiting_with_blocks"):
        assert [one._replace(prefix=()) for one in getattr(seen, name)] == list(getattr(view, name))
    assert (seen.slo, seen.reserved_blocks, seen.used_blocks) == (view.slo, 3, None)
    line = line_of(seen, None, policy="conserve", at=12.75)
    assert line == line_of(view, None, policy="conserve", at=12.75)


CLASSES: dict[str, Any] = {
    "slos": {"chat": Slo(ttft_ms=300.0, tbt_ms=40.0), DEFAULT_CLASS: Slo(harm=0.1)},
    "classes": {"decode0": "chat", "first": "chat", "gone": "chat"},
    "served": {"chat": 5.5, DEFAULT_CLASS: 70.0},
}


def test_classes_and_what_they_were_served_are_recorded() -> None:
    seen = through(view_of(**BUSY, **CLASSES)).view
    assert (seen.slos, seen.served) == (CLASSES["slos"], CLASSES["served"])
    assert seen.classes == {"decode0": "chat", "first": "chat"}, "of the requests in the line"
    assert [one.name for one in seen.waiting_online] == ["first"], "they are read for both"


def test_blocks_that_follow_each_other_are_one_run() -> None:
    """A prompt has a block for every 16 tokens, and a line is written for each iteration."""
    rows = [
        Candidate("one", 900, 0, prefix=[f"p{n}" for n in range(50)]),
        Candidate("other", 900, 0, prefix=[f"p{n}" for n in range(3)] + [f"q{n}" for n in range(47)]),
    ]
    coming = frozenset([*rows[1].prefix, "elsewhere"])
    line = line_of(view_of(waiting_offline=rows, coming=coming), None, policy="conserve", at=0.0)
    said = json.loads(line)["view"]
    assert [row[-1] for row in said["waiting_offline"]] == [[[0, 50]], [[0, 3], [50, 47]]]
    assert said["coming"] == [[0, 3], [50, 48]]


def test_only_lines_with_classes_are_new_to_an_earlier_conserve() -> None:
    """It would plan these otherwise, and it knows all fields of the others."""
    lines = [
        line_of(view, None, policy="conserve", at=0.0)
        for view in (view_of(**BUSY), view_of(**BUSY, **CLASSES))
    ]
    without, with_classes = map(json.loads, lines)
    assert (without["version"], with_classes["version"]) == (1, 2), "files have these numbers"
    assert with_classes["view"].keys() - without["view"].keys() == {*BY_CLASS}


def test_images_are_recorded_in_lines_that_are_new_to_an_earlier_conserve() -> None:
    seeing = {**BUSY, "waiting_offline": [ROW, FRESH._replace(images=IMAGES, prefix=SHARED)]}
    line = line_of(view_of(**seeing), None, policy="conserve", at=0.0)
    assert json.loads(line)["version"] == 7
    assert json.loads(line_of(view_of(parks=True), None, policy="conserve", at=0.0))["version"] == 8
    assert json.loads(line_of(view_of(ahead=True), None, policy="conserve", at=0.0))["version"] == 4
    adapters = json.loads(line_of(view_of(adapters={"row": 1}), None, policy="conserve", at=0.0))
    assert adapters["version"] == 5
    assert json.loads(line_of(view_of(kept_blocks=1), None, policy="conserve", at=0.0))["version"] == 6
    pushed = json.loads(line_of(view_of(pushed={"row"}), None, policy="conserve", at=0.0))
    assert pushed["version"] == 3
    promised = view_of(slo=Slo(stand_in_ttft_harm=0.1, stand_in_tbt_harm=0.2))
    slo = json.loads(line_of(promised, None, policy="conserve", at=0.0))["view"]["slo"]
    assert (slo["broken_ttft_harm"], slo["broken_tbt_harm"]) == (0.1, 0.2), "as before they were of other use"
    assert "adapters" in adapters["view"]
    assert not {"adapters", "pushed", "kv_groups"} & json.loads(line)["view"].keys(), (
        "as before there were any"
    )
    row, fresh = recorded(line).view.waiting_offline
    assert (row.images, fresh.images, len(fresh.prefix)) == ((), IMAGES, 3)
    assert line_of(recorded(line).view, None, policy="conserve", at=0.0) == line


def test_a_line_of_an_earlier_conserve_lacks_the_numbers_that_came_later() -> None:
    said = json.loads(line_of(view_of(**BUSY, utility=0.3), None, policy="conserve", at=0.0))
    del said["view"]["utility"]
    seen = recorded(json.dumps(said).encode()).view
    assert seen.utility == 0.9
    assert replace(seen, model=MS_PER_TOKEN) == replace(through(view_of(**BUSY)).view, model=MS_PER_TOKEN)


def test_requests_share_the_blocks_that_they_shared() -> None:
    seen = through(view_of(**BUSY)).view
    row, fresh, third = seen.waiting_offline
    assert row.prefix[:2] == fresh.prefix[:2]
    assert not set(row.prefix[2:]) & set(fresh.prefix[2:])
    assert (len(row.prefix), len(fresh.prefix), len(third.prefix)) == (3, 4, 0)
    assert len(seen.coming) == 2
    assert [block in seen.coming for block in row.prefix] == [False, True, False]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_plan_is_the_same_again(policy: str) -> None:
    plan = POLICIES[policy]().plan(view_of(**BUSY))
    again = through(view_of(**BUSY), plan)
    assert again.plan == plan
    assert POLICIES[policy]().plan(again.view) == plan
    assert (again.policy, again.at) == ("conserve", 12.75)


def test_lists_that_came_later_are_recorded_where_there_is_something_in_them() -> None:
    plan = Plan(tokens={"row": 3}, batch=Batch(), admitted=[], restored=[], evicted=[], parked=[])
    said = json.loads(line_of(view_of(), plan, policy="conserve", at=0.0))
    assert {"parked", "pushed"}.isdisjoint(said["plan"])
    assert through(view_of(), plan).plan == plan
    del said["plan"]["online_ms"]
    assert recorded(json.dumps(said).encode()).plan == plan
    both = replace(plan, parked=["other"], pushed={"row": 2})
    assert through(view_of(), both).plan == both


def corrected() -> CorrectedModel:
    """A model that is off by an odd factor, and knows it."""
    model = CorrectedModel(MS_PER_TOKEN, [Residual(20.0 + n, 1 + n / 3000) for n in range(400)])
    for n in range(20):
        model.observe(MS_PER_TOKEN_BATCH, 11.3 + n / 7)
    return model


MS_PER_TOKEN_BATCH = Conserve().plan(view_of(waiting_offline=[Candidate("one", 1, 0)])).batch


def test_a_model_that_has_learned_predicts_to_the_bit_what_it_did() -> None:
    model = corrected()
    view = view_of(**{**BUSY, "model": model, "slo": Slo(ttft_ms=900.0, tbt_ms=300.0)})
    plan = Conserve().plan(view)
    again = through(view, plan).view
    assert isinstance(again.model, FrozenModel)
    assert line_of(again, plan, policy="conserve", at=1.0) == line_of(view, plan, policy="conserve", at=1.0)
    assert Conserve().plan(again) == plan
    assert again.model.scale == model.scale != 1
    assert [again.model.margin(ms) for ms in (300.0, 299.0)] == [model.margin(ms) for ms in (300.0, 299.0)]


def test_a_frozen_model_has_its_scale_and_takes_the_nearest_margin() -> None:
    frozen = FrozenModel(MS_PER_TOKEN, scale=1.5, margins={24: 1.2, 32: 1.4})
    assert frozen.predict(MS_PER_TOKEN_BATCH) == 1.5 * 11
    assert [frozen.margin(ms) for ms in (1.0, 64.0, 256.0, 1e5)] == [1.2, 1.2, 1.4, 1.4]
    assert FrozenModel(MS_PER_TOKEN, scale=1.0, margins={}).margin(50.0) == 1.0


def test_no_model_is_no_model_again() -> None:
    assert through(view_of(model=TIMELESS)).view.model is TIMELESS


def test_waiting_requests_are_recorded_as_far_as_any_policy_could_admit_them() -> None:
    waiting = [Candidate(f"row{n}", 10, 0) for n in range(500)]
    assert len(
        [*through(view_of(waiting_offline=Lazy(iter(waiting)), free_slots=5)).view.waiting_offline]
    ) == (5 + READ_ON)
    for free_slots in (0, -3):  # none can be added, or more run than may
        seen = through(view_of(waiting_offline=Lazy(iter(waiting)), free_slots=free_slots)).view
        assert len([*seen.waiting_offline]) == READ_ON
    queue = Lazy(iter(waiting))
    for _, _ in zip(range(100), queue, strict=False):
        pass
    seen = through(view_of(waiting_offline=queue, free_slots=0)).view
    assert [*seen.waiting_offline] == waiting[:100], "all that the policy has read"


def test_what_was_read_of_a_queue_is_read_again_without_looking_further() -> None:
    queue = Lazy(iter(range(500)))
    for most in (3, 2, 3):
        assert [*islice(queue, most)] == [*range(most)]
        assert queue.known == 3
    assert [*islice(queue, 5)] == [*range(5)]
    short = Lazy(iter("ab"))
    assert [*short] == [*short] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "something"),
    [
        ({}, False),
        ({"tokens": {"live": 1}}, True),
        ({"restored": ["row"]}, True),
        ({"evicted": ["row"]}, True),
        ({"parked": ["row"]}, True),
    ],
)
def test_a_plan_changes_something_where_a_request_computes_comes_back_or_goes(
    changes: dict[str, Any], something: bool
) -> None:
    """All others are left out of the record."""
    assert Plan(**{"tokens": {}, "batch": Batch(), **changes}).changes_something is something


def test_limits_may_be_without_end() -> None:
    plan = POLICIES["paced"]().plan(view_of(waiting_offline=[FRESH]))
    assert plan is not None
    assert plan.limit_ms == float("inf")
    assert through(view_of(), plan).plan == plan


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b'{"version":1}', b"no", b'{"version":99}'])
def test_what_is_no_recorded_view_is_refused_in_a_sentence(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"recorded view"):
        recorded(line)


def test_a_line_of_a_later_version_is_refused_whatever_is_in_it() -> None:
    said = json.loads(line_of(view_of(**BUSY), None, policy="conserve", at=0.0))
    for version in (0, NEWEST + 1, 99):
        with pytest.raises(ValueError, match=f"recorded views of versions 1 to {NEWEST}, not {version}"):
            recorded(json.dumps({**said, "version": version}).encode())


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "views.jsonl"
    line = line_of(view_of(**BUSY), None, policy="conserve", at=1.0)
    file.write_bytes(line + b"\n" + line[:80] + b"\n" + line + b"\n" + line[:-30])
    assert [one.at for one in read(file)] == [1.0, 1.0]
    assert VERSION == 1


@pytest.mark.usefixtures("slow_disk")
class TestFile:
    """The file grows, is bounded, and fails alone."""

    @pytest.fixture
    def said(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Lines of the log; vLLM's logger passes nothing on, and other tests set its level."""
        found: list[str] = []
        log = logging.getLogger("vllm.conserve")
        monkeypatch.setattr(log, "disabled", False)
        before = log.level
        log.setLevel(logging.WARNING)

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                found.append(record.getMessage())

        listener = Listener()
        log.addHandler(listener)
        yield found
        log.removeHandler(listener)
        log.setLevel(before)

    def written(self, path: Path, *lines: bytes, **bound: int) -> LineAppender:
        recording = LineAppender(path, **bound)
        for line in lines:
            recording.add(line)
        recording.close()
        return recording

    def test_lines_are_appended_to_a_file_of_its_owners(self, tmp_path: Path, said: list[str]) -> None:
        file = tmp_path / "views"
        self.written(file, b"one", b"two")
        self.written(file, b"three")
        assert file.read_bytes() == b"one\ntwo\nthree\n"
        assert file.stat().st_mode & 0o777 == 0o600
        assert not said

    def test_a_line_that_was_cut_short_ends_where_it_is(self, tmp_path: Path) -> None:
        file = tmp_path / "views"
        file.write_bytes(b"one\ntw")
        self.written(file, b"three")
        assert file.read_bytes() == b"one\ntw\nthree\n"

    def test_the_size_is_bounded_also_over_several_starts(self, tmp_path: Path, said: list[str]) -> None:
        file = tmp_path / "views"
        recording = self.written(file, *[b"x" * 9] * 5, most_bytes=30)
        assert not recording.on
        assert file.read_bytes() == b"xxxxxxxxx\n" * 3
        assert said == [f"views are not recorded any more: {file} has 30 bytes, and 30 are the most"]
        self.written(file, b"y", most_bytes=30)
        assert file.stat().st_size == 30

    @pytest.mark.parametrize("path", ["/dev/full", "/proc/nowhere/views", "/"])
    def test_a_disk_that_fails_ends_the_recording_and_nothing_else(self, path: str, said: list[str]) -> None:
        recording = self.written(Path(path), *[b"x" * 10_000] * 20)
        assert not recording.on
        recording.add(b"more")
        (sentence,) = said
        assert sentence.startswith("views are not recorded any more: [Errno")

    def test_a_slow_disk_costs_lines_and_no_time(self, tmp_path: Path, said: list[str]) -> None:
        file, write = tmp_path / "views", threading.Event()

        class Slow(LineAppender):
            def _write(self, file: Any) -> None:
                write.wait()
                super()._write(file)

        recording = Slow(file)
        for n in range(MOST_QUEUED + 50):
            recording.add(b"%d" % n)
        assert said == [f"{file} is written too slowly: some views are left out"]
        write.set()
        recording.close()
        assert len(file.read_bytes().splitlines()) == MOST_QUEUED

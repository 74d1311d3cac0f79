"""Rows that are checkpointed, the copies of their blocks, and the flags that ask for it."""

import ctypes
import json
import threading
from collections.abc import Sequence
from math import inf
from types import SimpleNamespace

import pytest

from conserve.cli.serve_flags import checkpointing, host_bytes
from conserve.engine.policy.checkpointing import (
    ADAPTIVE,
    CHECKPOINTS,
    FEW,
    LITTLE,
    Adaptive,
    Eager,
    Marked,
    Pressure,
)
from conserve.engine.policy.own_checkpoints import policy_named
from conserve.engine.runtime import copy_thread
from conserve.engine.runtime.copy_budget import BlockMs, CopyBudget
from conserve.engine.runtime.copy_thread import CopyThread, Pieces, Region, merged, move_pieces
from conserve.engine.vllm.checkpoint.kv_transfer import FLAG, with_checkpoints, without_checkpoints
from conserve.errors import SettingsError
from conserve.names import OFF

OFFLINE = [Marked(f"row{n}", 10) for n in range(8)]
ONLINE = [Marked("live", 10, online=True)]


def pressure(free: int, *, host_room: int = 1000, budget: int = 1000) -> Pressure:
    return Pressure(100, free, host_room, budget)


def chosen(policy: Adaptive | Eager, rows: Sequence[Marked], free: int, **rest: int) -> dict[str, int]:
    """Blocks that one iteration copies."""
    now = pressure(free, **rest)
    if not policy.wants_marks(now):
        return {}
    policy.checkpoint(rows)
    return dict(policy.blocks_to_checkpoint(now))


def test_adaptive_does_nothing_while_half_of_the_memory_is_free() -> None:
    assert chosen(Adaptive(), OFFLINE, 50) == {}
    assert chosen(Adaptive(), OFFLINE, 49)


def test_adaptive_takes_a_few_blocks_of_the_first_row_and_then_more_of_more() -> None:
    counts = [chosen(Adaptive(), OFFLINE, free) for free in (48, 35, 20, 5, 1)]
    assert counts[0] == {"row0": FEW}
    blocks = [sum(one.values()) for one in counts]
    assert blocks == sorted(blocks)
    assert blocks[-1] >= 8 * blocks[0]
    assert len(counts[-1]) > 5


def test_adaptive_keeps_up_with_how_fast_memory_is_consumed() -> None:
    slow, fast = Adaptive(), Adaptive()
    rows = [Marked(f"row{n}", 100) for n in range(8)]
    for step in range(1, 11):
        slowly = chosen(slow, rows, 45 - step)
        quickly = chosen(fast, rows, 45 - 3 * step)
    same = pressure(15)
    for policy in (slow, fast):
        policy.checkpoint(rows)
    assert sum(slow.blocks_to_checkpoint(same).values()) < sum(fast.blocks_to_checkpoint(same).values()) * 3
    assert sum(slowly.values()) < sum(quickly.values())


@pytest.mark.parametrize(
    ("free", "blocks", "copied"),
    [
        ([480], 100, 4),  # a few
        ([250], 100, 25),  # half of the way to none: a quarter of what is left
        ([125], 100, 57),
        ([490, 450], 100, 8),  # as many as were consumed: a fifth of the last 40
        ([490, 450, 450], 100, 7),  # and of that a fifth less
        ([490, 450], 1000, 18),  # so that 1000 are copied by the time 450 are consumed
        ([450, 490], 100, 4),  # what was freed says nothing
        ([490, 450, 600, 450], 100, 4),  # what was before half was free neither
        ([490, 500, 450], 100, 4),
        ([490, 0], 100, 100),
        ([499, 499], 20_000, 4),  # no memory was consumed
        ([600, 499], 20_000, 4),  # nor counted while half was free
    ],
)
def test_adaptive_copies_as_much_as_memory_is_short_and_as_fast_as_it_goes(
    free: list[int], blocks: int, copied: int
) -> None:
    policy = Adaptive()
    for now in free:
        found: dict[str, int] = {}
        pressure = Pressure(1000, now, 1000, 1000)
        if policy.wants_marks(pressure):
            policy.checkpoint([Marked("row", blocks)])
            found = dict(policy.blocks_to_checkpoint(pressure))
    assert found == {"row": copied}


def test_adaptive_copies_in_time_also_for_the_last_free_block() -> None:
    """One block is free and 0.8 are consumed an iteration (a fifth of the last four), so 80 of 100 are copied."""
    policy = Adaptive()
    for free in (5, 1):
        policy.checkpoint([Marked("row", 100)])
        found = policy.blocks_to_checkpoint(Pressure(12, free, 1000, 1000))
    assert found == {"row": 80}


def test_adaptive_looks_at_more_rows_the_less_is_free() -> None:
    rows = [Marked(f"row{n}", 1) for n in range(8)]
    for free, count in ((49, 1), (44, 1), (43, 2), (25, 4), (1, 8)):
        assert len(chosen(Adaptive(), rows, free)) == min(count, FEW) if free > 24 else count


@pytest.mark.parametrize("policy", [Adaptive, Eager])
def test_blocks_go_row_after_row_and_live_requests_last(policy: type[Adaptive | Eager]) -> None:
    rows = [Marked("live", 2, online=True), Marked("a", 3), Marked("none", 0), Marked("b", 4)]
    for most, blocks in ((2, {"a": 2}), (5, {"a": 3, "b": 2}), (8, {"a": 3, "b": 4, "live": 1})):
        assert chosen(policy(), rows, 1, budget=most) == blocks
        assert chosen(policy(), rows, 1, host_room=most) == blocks
        assert list(chosen(policy(), rows, 1, budget=most)) == list(blocks)


@pytest.mark.parametrize("policy", [Adaptive, Eager])
def test_what_is_left_after_offline_rows_goes_to_live_requests(policy: type[Adaptive | Eager]) -> None:
    assert chosen(policy(), [Marked("a", 3), Marked("live", 2, online=True)], 1, budget=4) == {
        "a": 3,
        "live": 1,
    }


def test_more_reserved_blocks_than_free_ones_leave_none_to_offline_rows() -> None:
    for free, reserved, left in ((3, 1, 0.5), (3, 3, 0.0), (3, 4, 0.0)):
        assert Pressure(4, free, 0, 0, reserved).share_left == left


def test_an_eighth_of_the_memory_is_little_and_no_memory_at_all_is_plenty() -> None:
    live = [Marked("live", 3, online=True)]
    for policy in (Adaptive, Eager):
        for free, copied in ((125, {}), (124, {"live": 3})):
            one = policy()
            one.checkpoint(live)
            assert one.blocks_to_checkpoint(Pressure(1000, free, 1000, 10)) == copied
    assert Pressure(0, 0, 0, 0).share_free == Pressure(0, 0, 0, 0).share_left == 1.0
    for policy in (Adaptive, Eager):
        assert not policy().wants_marks(Pressure(10, 1, 1, 0))
        assert policy().wants_marks(Pressure(10, 1, 1, 1))
    assert not Eager().blocks_to_checkpoint(Pressure(10, 1, 1, 1))
    assert not Adaptive().blocks_to_checkpoint(Pressure(10, 1, 1, 1))


def test_live_requests_are_copied_only_where_memory_is_little() -> None:
    for policy in (Adaptive, Eager):
        assert "live" not in chosen(policy(), OFFLINE + ONLINE, int(LITTLE * 100) + 1)
        assert "live" in chosen(policy(), ONLINE, int(LITTLE * 100) - 1)


def test_no_policy_copies_more_than_it_may() -> None:
    for policy in (Adaptive, Eager):
        assert sum(chosen(policy(), OFFLINE, 2, budget=7).values()) == 7
        assert sum(chosen(policy(), OFFLINE, 2, host_room=5).values()) == 5
        assert chosen(policy(), OFFLINE, 2, budget=0) == {}


class Mine:
    """A user's policy."""

    def wants_marks(self, pressure: Pressure) -> bool:
        return True

    def checkpoint(self, rows: Sequence[Marked]) -> None:
        self.rows = rows

    def blocks_to_checkpoint(self, pressure: Pressure) -> dict[str, int]:
        return {row.name: 1 for row in self.rows}


class Unfinished:
    def checkpoint(self, rows: Sequence[Marked]) -> None: ...


def test_flags_name_policies() -> None:
    assert {*CHECKPOINTS, OFF} == {"adaptive", "eager", "off"}
    assert CHECKPOINTS[ADAPTIVE] is Adaptive


def test_a_policy_is_named_or_a_class_of_the_users() -> None:
    assert isinstance(policy_named("eager"), Eager)
    for name, why in (
        ("often", "there are adaptive, eager, off"),
        ("nowhere.Mine", "No module named 'nowhere'.*; install its module, or name its folder in PYTHONPATH"),
        (f"{__name__}.Yours", "Yours"),
        (f"{__name__}.Unfinished", r"no method wants_marks\(pressure\) and no method blocks_to_.*; define"),
    ):
        with pytest.raises(ValueError, match=why):
            policy_named(name)


def test_adaptive_begins_where_live_requests_to_come_leave_little() -> None:
    assert not Adaptive().wants_marks(Pressure(100, 60, 50, 4))
    assert Adaptive().wants_marks(Pressure(100, 60, 50, 4, reserved=20))
    live = [Marked("live", 3, online=True)]
    for policy in (Adaptive(), Eager()):  # whose memory is what is reserved
        policy.checkpoint(live)
        assert not policy.blocks_to_checkpoint(Pressure(100, 60, 50, 4, reserved=55))
        assert policy.blocks_to_checkpoint(Pressure(100, 10, 50, 4))


def test_copies_are_budgeted_each_way() -> None:
    budget = CopyBudget(BlockMs(2.0, 0.5), 0.1)
    assert budget.beside(40.0) == 4.0
    assert (budget.saves(4.0, 99), budget.restores(4.0, 99)) == (2, 8)
    assert (budget.saves(-1.0, 99), budget.restores(-1.0, 99), budget.restores(4.0, 0)) == (0, 1, 0)
    assert (budget.saves(inf, 7), budget.restores(inf, 5)) == (7, 5)
    budget.learn(BlockMs(None, 1.0))
    assert (budget.to_host_ms, budget.to_device_ms) == (2.0, 0.6)
    assert BlockMs(1.0, None).slower(BlockMs(3.0, None)) == BlockMs(3.0, None)


def test_neighbouring_blocks_are_one_run() -> None:
    assert merged([4, 5, 6, 9, 1], [0, 1, 2, 3, 4]) == [(4, 0, 3), (9, 3, 1), (1, 4, 1)]
    assert merged([4, 5], [1, 0]) == [(4, 1, 1), (5, 0, 1)]


def regions(count: int, blocks: int, size: int, fill: int) -> tuple[list[bytearray], list[Region]]:
    memory = [bytearray([fill]) * (blocks * size) for _ in range(count)]
    return memory, [
        Region(ctypes.addressof((ctypes.c_char * len(part)).from_buffer(part)), size) for part in memory
    ]


@pytest.mark.parametrize("how", ["at once", "in several calls", "refused", "cut short", "unknown"])
def test_blocks_are_copied_there_and_back_in_all_regions(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "in several calls":
        monkeypatch.setattr(copy_thread, "MOST_PIECES", 2)
    elif how != "at once":
        monkeypatch.setattr(
            copy_thread, "_copy_at_once", {"refused": lambda *_: -1, "cut short": lambda *_: 8}.get(how)
        )
    device, ours = regions(3, 8, 16, 1)
    host, theirs = regions(3, 4, 16, 0)
    for part in device:
        part[:] = bytes(n // 16 for n in range(len(part)))
    thread = CopyThread(ours, theirs)
    thread.copy([2, 3, 7], [0, 1, 3], is_store=True).synchronize()
    assert all(part[::16] == bytes([2, 3, 0, 7]) for part in host)
    done = thread.copy([3, 0], [5, 6], is_store=False)
    done.synchronize()
    assert not done.failed
    assert all(part[::16] == bytes([0, 1, 2, 3, 4, 7, 2, 7]) for part in device)
    assert (thread.stored.blocks, thread.stored.bytes, thread.loaded.blocks) == (3, 3 * 3 * 16, 2)
    thread.stop()


def test_a_copy_that_fails_says_so_and_the_next_is_made(caplog: pytest.LogCaptureFixture) -> None:
    _, ours = regions(1, 2, 8, 1)
    host, theirs = regions(1, 2, 8, 0)
    fails = threading.Event()
    fails.set()

    def move(to: Pieces, source: Pieces) -> None:
        if fails.is_set():
            raise OSError("no")
        move_pieces(to, source)

    thread = CopyThread(ours, theirs, move)
    first = thread.copy([0], [0], is_store=True)
    first.synchronize()
    fails.clear()
    second = thread.copy([0], [1], is_store=True)
    second.synchronize()
    thread.stop()
    assert (first.failed, second.failed) == (True, False)
    assert host[0] == bytes(8) + bytes([1]) * 8
    assert "could not be copied" in caplog.text


def test_a_copy_counts_the_time_of_its_thread_on_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the wall clock it would be the wait for the interpreter's lock too."""
    on_core_s = [1.0, 1.25]
    monkeypatch.setattr(copy_thread, "time", SimpleNamespace(thread_time=lambda: on_core_s.pop(0)))
    _, ours = regions(1, 2, 8, 1)
    _, theirs = regions(1, 2, 8, 0)
    thread = CopyThread(ours, theirs, move_pieces)
    thread.copy([0, 1], [0, 1], is_store=True).synchronize()
    thread.stop()
    assert (thread.stored.blocks, thread.stored.seconds) == (2, 0.25)


def config_of(flags: Sequence[str]) -> dict[str, object]:
    assert flags[-2] == FLAG
    found: dict[str, object] = json.loads(flags[-1])
    return found


def test_the_flag_names_our_connector() -> None:
    flags = with_checkpoints(["--dtype", "auto"], {"policy": "eager"})
    assert flags[:2] == ["--dtype", "auto"]
    found = config_of(flags)
    assert found["kv_connector"] == "CheckpointConnector"
    assert found["kv_role"] == "kv_producer", "it takes KV from no other engine"
    assert found["kv_load_failure_policy"] == "recompute"
    assert found["kv_connector_extra_config"] == {"policy": "eager"}


@pytest.mark.parametrize("joined", [True, False])
def test_another_connector_of_the_users_stays_beside_ours(joined: bool) -> None:
    theirs = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    words = [f"--kv_transfer_config={theirs}"] if joined else [FLAG, theirs]
    flags = with_checkpoints([*words, "--dtype", "auto"], {"policy": "eager"})
    assert flags[:2] == ["--dtype", "auto"]
    found = config_of(flags)
    assert found["kv_connector"] == "MultiConnector"
    extra = found["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    names = [one["kv_connector"] for one in extra["connectors"]]
    assert names == ["CheckpointConnector", "LMCacheConnectorV1"]


@pytest.mark.parametrize("theirs", [None, {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}])
def test_our_connector_is_taken_out_again(theirs: dict[str, str] | None) -> None:
    words = [] if theirs is None else [FLAG, json.dumps(theirs)]
    flags = without_checkpoints(with_checkpoints([*words, "--dtype", "auto"], {"policy": "eager"}))
    assert flags == ["--dtype", "auto", *words]
    assert without_checkpoints(flags) == flags


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"kv_connector": "CheckpointConnector"}'])
def test_a_connector_that_cannot_be_read_is_refused(said: str) -> None:
    with pytest.raises(SettingsError, match=FLAG):
        with_checkpoints([FLAG, said], {})


def test_sizes_of_host_memory() -> None:
    assert host_bytes("1GiB") == 1 << 30
    assert host_bytes("1.5 gb") == 1_500_000_000
    assert host_bytes("4096") == 4096
    assert 0 < host_bytes(None) <= 4 << 30
    for wrong in ("much", "-1GB", "0", "1PB", "900TiB"):
        with pytest.raises(SettingsError, match="--kv-host-memory"):
            host_bytes(wrong)


def test_flags_without_checkpoints_stay_as_they_are() -> None:
    assert checkpointing(["--dtype", "auto"], "off", None, None) == ["--dtype", "auto"]
    with pytest.raises(SettingsError, match="--kv-host-memory"):
        checkpointing([], "off", "1GiB", None)
    with pytest.raises(SettingsError, match="--kv-checkpoint: there is no checkpoint policy"):
        checkpointing([], "sometimes", None, None)

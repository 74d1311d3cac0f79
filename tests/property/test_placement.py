"""Properties of placement: no row is lost, prefixes stay together, and no server is far behind."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from conserve.jobs.fleet.pieces import MOST_AGAIN, Piece, UnplacedRow, pieces, work
from conserve.jobs.fleet.placement import WORTH, ServerLoad, cost_s, pays, place
from conserve.jobs.fleet.prefixes import CachedPrefixes
from tests.reach import reached

BLOCK = 16


def chained(parts: Sequence[int]) -> tuple[int, ...]:
    """A key: each of its numbers stands for a part and all before it."""
    return tuple(hash(tuple(parts[: n + 1])) for n in range(len(parts)))


KEYS = st.lists(st.integers(0, 2), max_size=6).map(chained)
ROWS = st.lists(st.tuples(KEYS, st.floats(1, 500)), min_size=1, max_size=40).map(
    lambda found: [UnplacedRow(n, key, tokens) for n, (key, tokens) in enumerate(found)]
)
LOADS = st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 10_000)), min_size=1, max_size=5)


def loads_of(found: Sequence[tuple[float, float]]) -> list[ServerLoad]:
    return [ServerLoad(tokens_per_s=rate, tokens=tokens, cached=set()) for rate, tokens in found]


@given(ROWS, st.integers(1, 5))
def test_each_row_is_in_one_piece(rows: list[UnplacedRow], servers: int) -> None:
    found = pieces(rows, servers=servers, block_tokens=BLOCK)
    assert sorted(row.number for piece in found for row in piece.rows) == [row.number for row in rows]


@given(ROWS, st.integers(1, 5))
def test_cutting_adds_few_tokens(rows: list[UnplacedRow], servers: int) -> None:
    """A piece that was cut off computes its prefix again on at most every other server."""
    found = pieces(rows, servers=servers, block_tokens=BLOCK)
    ordered = sorted(rows, key=lambda row: row.key)
    again = sum(work(piece.rows, BLOCK) for piece in found) - work(ordered, BLOCK)
    if reached("a prefix is in several pieces", again > 0):
        placed = place(found, loads_of([(1.0, 0.0)] * servers), block_tokens=BLOCK)
        computed = 0.0
        for server in range(servers):
            mine = [
                row
                for piece, index in zip(found, placed, strict=True)
                if index == server
                for row in piece.rows
            ]
            computed += work(sorted(mine, key=lambda row: row.key), BLOCK)
        assert computed <= work(ordered, BLOCK) * (1 + MOST_AGAIN) ** 7, "at most a tenth more a level"


@given(ROWS)
def test_with_one_server_nothing_is_cut_but_by_size(rows: list[UnplacedRow]) -> None:
    found = pieces(rows, servers=1, block_tokens=BLOCK)
    assert len(found) == 1


@given(ROWS, LOADS)
def test_each_piece_goes_where_it_costs_least(
    rows: list[UnplacedRow], found: list[tuple[float, float]]
) -> None:
    loads = loads_of(found)
    for piece in pieces(rows, servers=len(loads), block_tokens=BLOCK):
        costs = [cost_s(piece, load, BLOCK) for load in loads]
        (chosen,) = place([piece], loads, block_tokens=BLOCK)
        assert costs[chosen] == min(costs)


@given(KEYS.filter(bool), st.floats(0, 10_000), st.floats(0, 10_000))
def test_a_piece_moves_once_its_server_is_behind_by_more_than_it_is_worth(
    key: tuple[int, ...], behind: float, own: float
) -> None:
    piece = Piece([UnplacedRow(0, key, own)])
    home = ServerLoad(tokens_per_s=10.0, tokens=behind, cached=set(key))
    other = ServerLoad(tokens_per_s=10.0, tokens=0.0, cached=set())
    (chosen,) = place([piece], [home, other], block_tokens=BLOCK)
    worth = WORTH * BLOCK * len(key)
    assert abs(behind - worth) < 1e-6 or chosen == (1 if behind > worth else 0)


@given(ROWS, LOADS, st.floats(1.1, 50))
def test_a_faster_server_gets_no_fewer_tokens(
    rows: list[UnplacedRow], found: list[tuple[float, float]], times: float
) -> None:
    """A single piece never leaves a server because it became faster."""
    piece = Piece(sorted(rows, key=lambda row: row.key))
    (before,) = place([piece], loads_of(found), block_tokens=BLOCK)
    faster = [(rate * times if n == before else rate, tokens) for n, (rate, tokens) in enumerate(found)]
    (after,) = place([piece], loads_of(faster), block_tokens=BLOCK)
    assert after == before


@given(ROWS, st.floats(1, 1000), st.floats(0, 10_000), st.floats(1, 1000))
def test_a_piece_that_is_taken_over_is_done_sooner(
    rows: list[UnplacedRow], rate: float, tokens: float, idle_rate: float
) -> None:
    piece = Piece(sorted(rows, key=lambda row: row.key))
    slow = ServerLoad(tokens_per_s=rate, tokens=tokens + piece.tokens, cached=set())
    idle = ServerLoad(tokens_per_s=idle_rate, tokens=0.0, cached=set())
    if pays(piece, slow, idle, block_tokens=BLOCK):
        idle.take(piece, BLOCK)
        assert idle.wait_s < slow.wait_s


@given(st.lists(KEYS, max_size=30), st.integers(1, 20))
def test_a_cache_holds_no_more_than_it_can_and_the_last_row_whole(
    keys: list[tuple[int, ...]], most: int
) -> None:
    cached = CachedPrefixes(most)
    for key in keys:
        cached.add(key)
        held = [block in cached for block in key]
        assert held == sorted(held, reverse=True), "a prefix is held from its beginning"
        assert sum(held) == min(len(key), most)
    assert sum(block in cached for block in {block for key in keys for block in key}) <= most

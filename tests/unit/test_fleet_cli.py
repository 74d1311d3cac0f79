"""`conserve fleet` as a user meets it: the list, what it exits with, and servers that are drained."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from conserve.api.servers import ENDED, OTHER_VERSION, REFUSES_LOGIN, STOCK, WANTS_KEY, Unreported
from conserve.cli import server_status, status_report
from conserve.cli.fleet_report import Sight, document, lines, ways, well
from conserve.cli.harvest import targets
from conserve.cli.server_status import AskedServer
from conserve.config import Settings, load
from conserve.errors import UsageError
from conserve.jobs.harvest import notes, services
from conserve.jobs.harvest.notes import of_this_machine
from conserve.server_report import SchedulerReport
from conserve.store.books import servers
from conserve.store.books.readings import read_jobs
from conserve.store.books.servers import Feeding, SeenServer, Sighting
from conserve.store.database.store import Store
from tests import server_reports
from tests.acceptance.scripted_server import ScriptedServer
from tests.commands import conserve
from tests.store_rows import add_job

NOW = 1e9
A, B = "http://gpu-a:8000", "http://gpu-b:8000"


def sighting(url: str = A, **named: object) -> Sighting:
    values = {
        "url": url,
        "state": "serving",
        "model": "m",
        "version": "vLLM 0.32.0",
        "alive": True,
        "in_flight": 3,
        "waiting": 2,
        "tokens_per_s": 100.0,
        "why": None,
    }
    return Sighting(**{**values, **named})  # type: ignore[arg-type]


def feeding(**named: object) -> Feeding:
    values = {"owner": "a:1:2:3", "state": "serving", "in_flight": 3, "waiting": 0, "tokens_per_s": 10.0}
    return Feeding(**{**values, "why": None, "noted_at": NOW, **named})  # type: ignore[arg-type]


def sight(
    *feedings: Feeding,
    drained_at: float | None = None,
    report: SchedulerReport | None = None,
    error: str | None = None,
) -> Sight:
    seen = SeenServer(url=A, model="m", version=None, seen_at=NOW, drained_at=drained_at, feedings=feedings)
    return Sight(server=seen, now=NOW, report=report, error=error)


LONG = "http://gpu-{}.cluster.internal.example.com:8000"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is a terminal of 80 columns."""
    monkeypatch.setattr("conserve.cli.output.width", lambda: 80)


def named(url: str, **more: Any) -> Sight:
    found = sight(feeding())
    return replace(found, server=replace(found.server, url=url, **more))


@pytest.mark.usefixtures("narrow")
def test_a_narrow_terminal_shortens_addresses_and_names_in_the_middle() -> None:
    model, version = "meta-llama/Llama-3.3-70B-Instruct", "vLLM 0.32.0"
    found = [named(LONG.format(number), model=model, version=version) for number in ("a", "b")]
    shown = lines(found)
    assert max(map(len, shown)) <= 80
    assert [line.partition(" ")[0] for line in shown[1:]] == [
        "http://gpu-a…:8000",
        "http://gpu-b…:8000",
    ]
    assert document(found[0])["url"] == LONG.format("a")
    alike = [named(LONG.format(number), model=model) for number in ("east-1-rack-17", "east-1-rack-18")]
    assert len({line.partition(" ")[0] for line in lines(alike)[1:]}) == 2, "told apart"


@pytest.mark.usefixtures("narrow")
def test_a_picture_covers_the_lines_that_a_narrow_terminal_broke(capsys: pytest.CaptureFixture[str]) -> None:
    repaint = status_report.Repaint(enabled=True)
    repaint.before(["a" * 80, f"\x1b[31m{'b' * 81}\x1b[0m", ""])
    repaint.before([])
    assert capsys.readouterr().out == "\x1b[4F\x1b[J"


def test_nothing_is_shortened_where_nobody_reads_along() -> None:
    assert LONG.format("a") in lines([named(LONG.format("a"), model="m" * 50)])[1]


@pytest.mark.usefixtures("narrow")
def test_a_narrow_terminal_shortens_tags_and_the_address_of_a_server(
    store: Store, settings: Settings
) -> None:
    add_job(store, rows=2, tags={"team": "research-and-development-of-everything"})
    shown = status_report.table(read_jobs(settings, now=NOW))
    assert max(map(len, shown)) <= 80
    assert "…" in shown[1]
    (line, _) = server_status.lines([AskedServer(LONG.format("x" * 40), STOCK)])
    assert line.startswith("http://gpu-xxx")
    assert line.endswith("example.com:8000  runs another scheduler")
    assert len(line) == 80


def on_this_machine(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    """Let these servers run over the store."""
    found = [services.RunningServer(url=url, owner="a:1:2:3", network="", elsewhere="") for url in urls]
    monkeypatch.setattr(server_status, "running", lambda settings: found)


def test_status_asks_servers_at_the_same_time(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that hangs takes two seconds."""
    all_asked = threading.Barrier(3, timeout=60.0)

    def ask(url: str, settings: Settings) -> Unreported:
        all_asked.wait()
        return Unreported(f"{url} is busy")

    on_this_machine(monkeypatch, A, B, "http://gpu-c:8000")
    monkeypatch.setattr(server_status, "ask", ask)
    assert server_status.read_servers(settings) == [
        (url, (f"{url} is busy",)) for url in (A, B, "http://gpu-c:8000")
    ]


@pytest.mark.parametrize("job", [None, "job-1"])
def test_status_in_json_asks_no_server_and_foresees_nothing(
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: str | None,
) -> None:
    """It shows neither servers nor forecasts."""

    def refuse(*_: object) -> None:
        pytest.fail("JSON has none of it")

    add_job(store, "job-1", rows=2)
    on_this_machine(monkeypatch, A)
    monkeypatch.setattr(server_status, "ask", refuse)
    monkeypatch.setattr(status_report, "forecast_words", refuse)
    status_report.answer(settings, status_report.StatusArguments(job=job, as_json=True))
    assert "job-1" in capsys.readouterr().out


def note(store: Store, *sightings: Sighting, owner: str = "a", now: float = NOW) -> None:
    with store.write() as tx:
        servers.note(tx, owner, sightings, now=now)


def everything(store: Store) -> list[SeenServer]:
    with store.read() as tx:
        return servers.everything(tx)


def test_each_harvester_has_its_own_note_of_a_server(store: Store) -> None:
    note(store, sighting(), sighting(B), owner="a")
    note(store, sighting(in_flight=1), owner="b", now=NOW + 1)
    note(store, sighting(in_flight=7), owner="a", now=NOW + 2)
    first, second = everything(store)
    assert [(one.owner, one.in_flight) for one in first.feedings] == [("a", 7), ("b", 1)]
    assert (second.url, second.feedings) == (B, [])
    with store.write() as tx:
        servers.forget(tx, "a")
    assert [one.owner for one in everything(store)[0].feedings] == ["b"]
    note(store, owner="b")
    assert [one.feedings for one in everything(store)] == [[], []], "it feeds none any more"


def test_the_last_sign_of_life_is_that_of_a_server_that_answered(store: Store) -> None:
    note(store, sighting())
    note(store, sighting(alive=False, state="down", model=None, version=None), now=NOW + 60)
    (found,) = everything(store)
    assert (found.seen_at, found.model, found.version) == (NOW, "m", "vLLM 0.32.0")


def test_servers_are_forgotten_after_a_week_unless_they_are_drained(store: Store) -> None:
    note(store, sighting(), sighting(B))
    with store.write() as tx:
        servers.drain(tx, "gpu-b", now=NOW)
        servers.forget(tx, "a")
        servers.forget_old(tx, now=NOW + servers.KEPT_S + 1)
    assert [server.url for server in everything(store)] == [B]


def test_a_server_is_named_by_url_host_and_port_or_host(store: Store) -> None:
    note(store, sighting("http://gpu-a:8000"), sighting("http://gpu-a:8001"), sighting(B))
    with store.read() as tx:
        assert servers.named(tx, "gpu-a") == ["http://gpu-a:8000", "http://gpu-a:8001"]
        assert servers.named(tx, "gpu-a:8001") == ["http://gpu-a:8001"]
        assert servers.named(tx, "http://gpu-b:8000/v1") == [B]
        with pytest.raises(UsageError, match=f"there is no server gpu-c; there are .*{B}"):
            servers.named(tx, "gpu-c")


def test_draining_keeps_its_first_moment_and_undraining_ends_it(store: Store) -> None:
    note(store, sighting(), sighting(B))
    with store.write() as tx:
        servers.drain(tx, "gpu-a", now=NOW)
        servers.drain(tx, "gpu-a", now=NOW + 1)
        assert servers.drained(tx) == {A}
    assert everything(store)[0].drained_at == NOW
    with store.write() as tx:
        servers.undrain(tx, "gpu-a")
        assert not servers.drained(tx)


@pytest.mark.parametrize(
    ("last", "owner_noted", "drained", "kept"),
    [
        (0.0, None, False, True),
        (0.001, None, False, False),
        (0.001, None, True, True),
        (9.0, servers.KEPT_S, False, True),
        (9.0, servers.KEPT_S + 0.5, False, False),
        (9.0, -servers.KEPT_S, False, True),
        (9.0, -servers.KEPT_S - 0.5, False, False),
    ],
)
def test_a_server_is_listed_for_a_week_behind_its_last_sign_of_life_or_note(
    store: Store, last: float, owner_noted: float | None, drained: bool, kept: bool
) -> None:
    """The last sign is `last` seconds more than a week ago; a clock that was set back makes notes of the future."""
    now = NOW + servers.KEPT_S + last
    note(store, sighting(), now=NOW)
    with store.write() as tx:
        if owner_noted is None:
            servers.forget(tx, "a")
        else:
            tx.execute(text("update feeding set noted_at = :at"), {"at": now - owner_noted})
        if drained:
            servers.drain(tx, A, now=NOW)
        servers.forget_old(tx, now=now)
    assert [one.url for one in everything(store)] == ([A] if kept else [])


def test_a_server_that_never_answered_is_forgotten_once_nobody_feeds_it(store: Store) -> None:
    note(store, sighting(alive=False, state="down"))
    (found,) = everything(store)
    assert (found.seen_at, found.model, found.version, found.drained_at) == (None, None, None, None)
    for left in (1, 0):
        with store.write() as tx:
            servers.forget_old(tx, now=NOW)
        assert len(everything(store)) == left
        with store.write() as tx:
            servers.forget(tx, "a")


def test_a_server_that_answers_again_has_its_new_model_and_stays_drained(store: Store) -> None:
    note(store, sighting(), sighting(B))
    with store.write() as tx:
        assert servers.drain(tx, "gpu-a", now=NOW) == [A]
    note(store, sighting(model="n", version="vLLM 0.33.0", why="slow"), now=NOW + 60)
    first, second = everything(store)
    assert (first.model, first.version, first.seen_at, first.drained_at) == (
        *("n", "vLLM 0.33.0", NOW + 60, NOW),
    )
    assert [(one.why, one.waiting, one.tokens_per_s, one.noted_at) for one in first.feedings] == [
        ("slow", 2, 100.0, NOW + 60)
    ]
    assert (second.seen_at, second.feedings) == (NOW, []), "it is not fed any more"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("http://gpu-b:8000/v1/", [B]),
        ("http://gpu-b:8000/", [B]),
        ("gpu-b:8000", [B]),
        ("gpu-b", [B]),
        ("gpu-c:9", ["http://me@gpu-c:9"]),
        ("gpu-c", ["http://me@gpu-c:9"]),
    ],
)
def test_drains_concern_the_servers_of_a_name_alone(store: Store, name: str, found: list[str]) -> None:
    note(store, sighting(), sighting(B), sighting("http://me@gpu-c:9"))
    with store.write() as tx:
        assert servers.drain(tx, name, now=NOW) == found
        assert servers.drained(tx) == set(found)
        servers.drain(tx, A, now=NOW)
        assert servers.undrain(tx, name) == found
        assert servers.drained(tx) == {A}


@pytest.mark.parametrize("name", ["", "gpu", "8000", "http://gpu-b", "me@gpu-c:9"])
def test_a_name_of_no_server_is_said_with_those_that_there_are(store: Store, name: str) -> None:
    with pytest.raises(UsageError) as said, store.write() as tx:
        servers.drain(tx, name, now=NOW)
    assert str(said.value) == f"there is no server {name}; no harvester has seen any yet"
    note(store, sighting(B), sighting(), sighting("http://me@gpu-c:9"))
    with pytest.raises(UsageError) as said, store.write() as tx:
        servers.undrain(tx, name)
    assert str(said.value) == f"there is no server {name}; there are {A}, {B}, http://me@gpu-c:9"


@pytest.mark.parametrize(("ago_s", "fresh"), [(30.0, True), (30.1, False), (-30.0, True), (-30.1, False)])
def test_a_note_is_fresh_for_half_a_minute_also_under_a_clock_that_was_set_back(
    ago_s: float, fresh: bool
) -> None:
    assert feeding(noted_at=0.0).is_fresh(ago_s) is fresh


def test_harvesters_are_listed_by_name(store: Store) -> None:
    for owner in ("c", "a", "b"):
        note(store, sighting(B), sighting(), owner=owner)
    assert [(one.url, [each.owner for each in one.feedings]) for one in everything(store)] == [
        (A, ["a", "b", "c"]),
        (B, ["a", "b", "c"]),
    ]


def test_the_state_is_the_worst_that_a_live_harvester_sees() -> None:
    silent = feeding(state="suspected", noted_at=NOW - servers.NOTE_FRESH_S - 1)
    assert sight().state == "not fed"
    assert sight(silent).state == "not fed"
    assert sight(silent, feeding()).state == "serving"
    assert sight(feeding(), feeding(state="suspected")).state == "suspected"
    assert sight(feeding(state="down"), feeding(state="busy")).state == "down"


def test_a_server_is_draining_until_each_harvester_has_no_row_there() -> None:
    assert sight(feeding(noted_at=NOW), drained_at=NOW - 1).state == "draining"
    assert sight(feeding(in_flight=0, noted_at=NOW - 2), drained_at=NOW - 1).state == "draining", (
        "not seen yet"
    )
    assert sight(feeding(in_flight=0, waiting=1), drained_at=NOW - 1).state == "draining"
    assert sight(feeding(in_flight=0), drained_at=NOW - 1).state == "drained"
    assert sight(drained_at=NOW - 1).state == "drained"


def test_an_slo_is_kept_broken_or_unknown() -> None:
    def online(p99: float | None = 9.0, **named: object) -> SchedulerReport:
        return server_reports.report(online={"tbt_ms": {"p50": p99, "p99": p99}, **named})

    assert sight(report=None).slo_kept is None
    assert sight(report=online(None)).slo_kept is None, "no live request in the last minute"
    assert sight(report=online()).slo_kept is True
    assert sight(report=online(attainment=0.9)).slo_kept is False
    kept, broken = ({"promised_ms": 9.0, "seen_ms": 9.0, "kept": kept} for kept in (True, False))
    promised = {"ttft_ms": {"p50": kept, "p99": broken}}
    assert sight(report=online(promises=promised)).slo_kept is False
    assert [well(sight(feeding(), report=online(attainment=a))) for a in (1.0, 0.9)] == [True, False]
    assert not well(sight(feeding(state="down")))


def test_a_server_whose_scheduler_is_silent_is_not_well_whatever_its_last_report_says() -> None:
    online = {"tbt_ms": {"p50": 9.0, "p99": 9.0}}
    fresh, stale = (
        sight(feeding(), report=server_reports.report(online=online, age_s=age_s)) for age_s in (59.0, 97.0)
    )
    assert (fresh.state, fresh.slo_kept, well(fresh)) == ("serving", True, True)
    assert (stale.state, stale.slo_kept, well(stale)) == ("silent", None, False)
    assert lines([stale])[-1] == (
        f"{A}: its scheduler has not answered for 1 min 37 s: does its engine hang?"
    )
    assert document(stale)["state"] == "silent"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WANTS_KEY, f"{WANTS_KEY}, or its SLO is not seen"),
        (REFUSES_LOGIN, REFUSES_LOGIN),
        (OTHER_VERSION, OTHER_VERSION),
    ],
)
def test_a_server_that_refuses_the_caller_is_not_watched(error: str, said: str) -> None:
    refused = sight(feeding(), error=error)
    assert (refused.state, refused.slo_kept, well(refused)) == ("serving", None, False)
    assert lines([refused])[-1] == f"{A}: {said}"


def test_a_server_is_no_longer_suspected_where_no_row_could_clear_it() -> None:
    suspected = sight(feeding(state="suspected"))
    assert not well(suspected)
    assert well(suspected, rows_wait=False)
    assert not well(sight(feeding(state="down")), rows_wait=False)


def test_rows_that_wait_while_no_harvester_feeds_a_server_are_said(
    store: Store, server: ScriptedServer
) -> None:
    note(store, sighting(server.url), now=time.time() - 60)
    assert conserve("fleet", "--check").returncode == 0, "no row waits"
    conserve("submit", "-", "--prompt", "{{ q }}", stdin='{"q": "a"}\n{"q": "b"}\n')
    done = conserve("fleet", "--check")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "no harvester feeds a server, and 2 rows wait; run: conserve harvest --endpoint URL"
    ]
    note(store, sighting(server.url), now=time.time())
    assert conserve("fleet", "--check").returncode == 0


def test_a_server_is_drained_under_the_name_of_the_machine_too(store: Store) -> None:
    """A store that was moved has it under its loopback address, and a harvester notes it under the machine's."""
    host = socket.gethostname()
    note(store, sighting("http://localhost:8000", in_flight=0), now=time.time() - 300)
    note(store, sighting(f"http://{host}:8000", in_flight=2), now=time.time())
    waited = conserve("fleet", "drain", "localhost:8000", "--wait", "--within-s", "1")
    assert waited.returncode == 1
    assert f"http://{host}:8000 has" in waited.stderr
    assert f"http://{host}:8000 gets rows again" in conserve("fleet", "undrain", "localhost:8000").stderr


def test_what_is_wrong_stands_below_the_table() -> None:
    found = sight(feeding(state="down", why="cannot reach it"), feeding(state="down", why="cannot reach it"))
    assert lines([found])[-1] == f"{A}: cannot reach it"
    assert document(found)["why"] == "cannot reach it"


def test_without_servers_the_list_says_what_to_run() -> None:
    done = conserve("fleet")
    assert (done.returncode, done.stdout) == (0, "")
    assert "run: conserve harvest --endpoint URL" in done.stderr
    assert json.loads(conserve("fleet", "--json").stdout) == []


@pytest.fixture
def server(slow_servers: None) -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def test_the_list_asks_each_server_for_its_slo(store: Store, server: ScriptedServer) -> None:
    note(
        store, sighting(server.url), sighting("http://127.0.0.1:9", state="down", why="gone"), now=time.time()
    )
    done = conserve("fleet")
    assert done.returncode == 0, done.stderr
    assert "SERVER" in done.stdout.splitlines()[0]
    assert "http://127.0.0.1:9: gone" in done.stdout
    assert conserve("fleet", "--check").returncode == 1
    found = json.loads(conserve("fleet", "list", "--json").stdout)
    assert {one["url"]: one["state"] for one in found} == {
        server.url: "serving",
        "http://127.0.0.1:9": "down",
    }
    assert any(path.startswith("/v1/conserve?within_s=") for path in server.gets)


def test_a_server_that_was_stopped_is_told_from_one_that_gets_no_rows(
    store: Store, server: ScriptedServer
) -> None:
    note(store, sighting(server.url), sighting("http://127.0.0.1:9"), now=time.time() - 60)
    done = conserve("fleet", "--check")
    assert done.returncode == 0, "none of them is down to a harvester"
    gone = "http://127.0.0.1:9: does not answer (starting, or ended), and no harvester feeds it"
    assert done.stdout.splitlines()[-1] == gone
    found = json.loads(conserve("fleet", "--json").stdout)
    assert {one["url"]: one["state"] for one in found} == {
        server.url: "not fed",
        "http://127.0.0.1:9": "gone",
    }


def test_a_server_that_is_busy_is_not_gone() -> None:
    assert sight(error="does not answer (busy)").state == "not fed"
    assert sight(feeding(), error=ENDED).state == "serving", (
        "it starts again, or is reached from elsewhere alone"
    )


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_probe_that_watches_no_server_fails(store: Store, more: tuple[str, ...]) -> None:
    assert conserve("fleet", *more).returncode == 0
    assert conserve("fleet", "--check", *more).returncode == 1


def test_a_submit_names_the_server_that_takes_the_rows(store: Store) -> None:
    def said(*words: str) -> str:
        rows = '{"q": "a"}\n'
        return conserve("submit", "-", "--prompt", "{{ q }}", *words, stdin=rows).stderr.splitlines()[0]

    here, by_hand = "http://127.0.0.1:8000", "queued 1 row; run them with: conserve run"
    assert said() == by_hand
    note(store, sighting(here), now=time.time())
    feeds = f"the harvester of {here} takes them, unless it is for named jobs alone"
    assert said() == f"queued 1 row; {feeds}; watch with: conserve status --watch"
    assert said("--model", "another") == by_hand
    with services.announce(load(), here):
        assert said() == f"queued 1 row; {here} takes them; watch with: conserve status --watch"
        assert said("--model", "another") == by_hand
        note(store, sighting(here), now=time.time() - 60)
        assert said() == by_hand, "a server with --no-harvest"
        note(store, sighting(here, state="down"), now=time.time())
        assert said() == by_hand


def test_a_retry_names_the_server_that_takes_the_rows(store: Store) -> None:
    job_id = conserve("submit", "-", "--prompt", "{{ q }}", stdin='{"q": "REJECT"}\n').stdout.strip()
    assert conserve("run", "--endpoint", "fake:").returncode == 5
    here = "http://127.0.0.1:8000"
    note(store, sighting(here, model="fake"), now=time.time())
    with services.announce(load(), here):
        said = conserve("retry", job_id).stderr.splitlines()
    assert said == [f"{here} takes them; watch with: conserve status --watch"]


def test_draining_by_name_and_its_mistakes(store: Store) -> None:
    note(store, sighting(), now=time.time())
    done = conserve("fleet", "drain", "gpu-a")
    assert (done.returncode, f"{A} is drained" in done.stderr) == (0, True)
    late = conserve("fleet", "drain", "gpu-a", "--wait", "--within-s", "1")
    assert late.returncode == 1
    assert "rows are still in flight after 1 s" in late.stderr
    note(store, sighting(in_flight=0, waiting=0, state="drained"), now=time.time())
    assert "no row is in flight there" in conserve("fleet", "drain", "gpu-a", "--wait").stderr
    assert f"{A} gets rows again" in conserve("fleet", "undrain", "gpu-a").stderr
    wrong = conserve("fleet", "drain", "gpu-z")
    assert (wrong.returncode, f"there is no server gpu-z; there are {A}" in wrong.stderr) == (2, True)


def test_a_server_of_which_no_harvester_tells_is_not_called_empty(store: Store) -> None:
    """A harvester that lost the database may have rows there; one that was killed has none."""
    note(store, sighting(in_flight=3), now=time.time() - servers.NOTE_FRESH_S - 9)
    said = conserve("fleet", "drain", "gpu-a", "--wait")
    assert (said.returncode, "no row is" in said.stderr) == (0, False)
    assert f"no harvester has told of {A} for half a minute" in said.stderr


def test_flags_for_servers_win_over_the_variables_of_both_kinds(settings: Settings) -> None:
    from dataclasses import replace

    both = replace(settings, endpoint="http://env", endpoints="dns://env:1 file://env")
    assert targets(both, [], []) == (["http://env"], ["dns://env:1", "file://env"])
    assert targets(both, ["http://flag"], []) == (["http://flag"], [])
    assert targets(both, [], ["dns://flag:1"]) == ([], ["dns://flag:1"])


def test_a_list_or_a_server_that_makes_no_sense_is_a_usage_error(store: Store) -> None:
    assert conserve("harvest", "--endpoints", "http://a:1").returncode == 2
    wrong = conserve("harvest", "--endpoint", "http://a:1", "--endpoint", "b:1")
    assert (wrong.returncode, "takes an http:// or https:// address" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("url", "known_as"),
    [
        ("http://127.0.0.1:8000", f"http://{socket.gethostname()}:8000"),
        ("https://localhost", f"https://{socket.gethostname()}"),
        ("http://[::1]:8000", f"http://{socket.gethostname()}:8000"),
        (A, A),
    ],
)
def test_a_loopback_address_is_another_server_on_each_machine(url: str, known_as: str) -> None:
    assert of_this_machine(url) == known_as


class OneServer:
    """A fleet of one server of this machine."""

    drained: set[str]

    def sightings(self) -> list[Sighting]:
        return [sighting("http://127.0.0.1:8000")]

    def drain(self, urls: set[str]) -> None:
        self.drained = urls


@pytest.mark.parametrize(("is_shared", "name"), [(False, "127.0.0.1"), (True, socket.gethostname())])
def test_a_store_of_several_machines_knows_servers_by_the_machines_name(
    store: Store, is_shared: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "is_shared", lambda store: is_shared)
    url = f"http://{name}:8000"
    note(store, sighting(url))
    with store.write() as tx:
        servers.drain(tx, name, now=NOW)

    async def in_store(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    fleet = OneServer()
    looking = notes.ServerNotes(fleet, store, "b", in_store, clock=lambda: NOW, monotonic=lambda: 0.0)
    asyncio.run(looking.look())
    (found,) = everything(store)
    assert (found.url, [feeding.owner for feeding in found.feedings]) == (url, ["a", "b"])
    assert "http://127.0.0.1:8000" in fleet.drained


def test_a_server_of_this_machine_is_asked_on_its_loopback_address_too() -> None:
    assert ways(A) == [A]
    name = socket.gethostname().lower()
    assert ways(f"http://{name}:8000") == [f"http://{name}:8000", "http://127.0.0.1:8000"]

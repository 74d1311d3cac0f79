"""`conserve top`: what is on the screen, what its keys do, and what it shows of servers that are gone."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from concurrent.futures import Future
from typing import Any

import pytest

from conserve.api import overview
from conserve.api.overview import CounterRate, Latency, Overview, ServerSeen, StoreWatch, server_seen
from conserve.api.servers import OTHER_VERSION, STOCK, Unreported
from conserve.cli import bars, top, top_frame
from conserve.cli.context import Context
from conserve.cli.top_frame import ScreenState
from conserve.cli.top_keys import key_names
from conserve.config import load
from conserve.errors import StoreError
from conserve.server_report import SchedulerReport
from conserve.store.books.readings import read_jobs
from conserve.store.database.store import Store
from tests.commands import REPOSITORY, conserve, until
from tests.conftest import WriteInput
from tests.server_reports import report
from tools.docs.screen import OVERVIEW

SAID: dict[str, Any] = {
    "online": {
        "ttft_ms": {"p50": 200.0, "p99": 1601.0},
        "tbt_ms": {"p50": 40.0, "p99": 88.0},
        "attainment": 0.98,
        "promises": {
            "ttft_ms": {"p99": {"promised_ms": 1500.0, "seen_ms": 1601.0, "kept": False}},
            "tbt_ms": {"p99": {"promised_ms": 100.0, "seen_ms": 88.0, "kept": True}},
        },
    },
    "offline": {"tokens": 5000, "tokens_per_s": 1480.4},
    "preemption": {"iterations_left": 12, "tokens_redone": 512},
    "checkpoint": {"tokens_restored": 96, "tokens_recomputed": 7},
}
REPORT = report(**SAID)
UNSEEN: dict[str, Any] = {"promised_ms": 1500.0, "seen_ms": None, "kept": True}


def submitted(write_input: WriteInput) -> str:
    done = conserve("submit", str(write_input(q=["a", "b"])), "--prompt", "{{ q }}")
    assert done.returncode == 0
    return done.stdout.strip()


def state() -> str:
    (reading,) = read_jobs(load(), now=time.time())
    return reading.state.value


def plain(seen: Overview, choice: ScreenState, **size: int) -> list[str]:
    """Lines of a frame without colours."""
    return [line.plain for line in top_frame.frame(seen, choice, **size)]


def watch(said: Any, *endpoints: str) -> StoreWatch:
    """A watch whose servers answer at once."""
    return StoreWatch(load(), endpoints, asking=lambda url, settings: said(url) if callable(said) else said)


# The screen.


@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 50), (60, 12), (40, 8)])
@pytest.mark.parametrize("help_is_shown", [False, True])
def test_a_frame_fills_the_screen_exactly(width: int, height: int, help_is_shown: bool) -> None:
    lines = plain(OVERVIEW, ScreenState(job="news-2b7d", help=help_is_shown), width=width, height=height)
    assert len(lines) == height
    if width >= 80:
        assert max(map(len, lines)) <= width
    painted = top.coloured_lines(
        top_frame.frame(OVERVIEW, ScreenState(), width=width, height=height), width, colours=True
    )
    assert len(painted) == height, "no line wraps"


def test_the_screen_at_80x24_is_the_one_of_the_documentation() -> None:
    lines = [line.rstrip() for line in plain(OVERVIEW, ScreenState(job="news-2b7d"))]
    assert lines[1].split()[:2] == ["1,480", "tokens/s"]
    assert "1,294,640 rows left, all done by 21:03 (50 %), 23:23 (90 %)" in lines[2]
    (chat,) = [line for line in lines if "gpu1:8000" in line]
    assert re.search(r"TTFT\s+412/1,500 .*TBT\s+104/100", chat)
    (gone,) = [line for line in lines if "gpu3:8000" in line]
    assert "does not answer" in gone
    (news,) = [line for line in lines if "news-2b7d" in line and "▸" in line]
    assert "running" in news
    assert " 25% 15,360/60,000     7  15:05/15:38 81%" in news
    assert "q quit" in lines[-1]


def test_the_chosen_job_is_on_the_screen_however_long_the_list() -> None:
    many = [make_job(number) for number in range(200)]
    seen = Overview(at=OVERVIEW.at, store="store", jobs=many)
    for job in (many[0], many[100], many[-1]):
        lines = plain(seen, ScreenState(job=job.id))
        assert sum(line.startswith("▸ ") for line in lines) == 1
        assert any("more" in line for line in lines)


def make_job(number: int) -> Any:
    from dataclasses import replace

    return replace(OVERVIEW.jobs[-1], id=f"job-{number:04}")


def test_finished_jobs_are_shown_on_request_or_alone() -> None:
    every = top_frame.shown_jobs(OVERVIEW.jobs, everything=True)
    some = top_frame.shown_jobs(OVERVIEW.jobs, everything=False)
    assert len(every) == len(OVERVIEW.jobs) > len(some)
    assert not any(job.state.final for job in some)
    finished = [job for job in OVERVIEW.jobs if job.state.final]
    assert top_frame.shown_jobs(finished, everything=False) == finished[-1:]


def test_a_broken_promise_is_red_and_a_kept_one_is_not() -> None:
    broken = server_seen("http://a", REPORT)
    assert (broken.ttft_ms.kept, broken.tbt_ms.kept) == (False, True)
    line = top_frame.server_lines(broken, 80)[0]
    red = {line.plain[span.start : span.end].strip() for span in line.spans if "red" in str(span.style)}
    assert "1,601/1,500" in red
    assert not any("88/100" in text for text in red)


def told(**promises: tuple[float, float]) -> SchedulerReport:
    """A server's report with promises of the TBT, as (promised, seen)."""
    named = {
        name: {"promised_ms": bound, "seen_ms": seen, "kept": seen <= bound}
        for name, (bound, seen) in promises.items()
    }
    online = {name: SAID["online"][name] for name in ("ttft_ms", "tbt_ms")}
    return report(online={**online, "promises": {"tbt_ms": named}})


@pytest.mark.parametrize(
    ("promises", "words", "is_kept"),
    [
        ({"p50": (40.0, 33.0)}, "TBT p50 33/40 ", True),
        ({"mean": (40.0, 41.0)}, "TBT mean 41/40 ", False),
        ({"p50": (40.0, 52.0), "p99": (150.0, 88.0)}, "TBT p50 52/40 ", False),
        ({"p50": (40.0, 33.0), "p99": (150.0, 88.0)}, "TBT      88/150 ", True),
        ({"p99.9": (11_500.0, 12_601.0)}, "TBT p99.9 12,601/11,500 ", False),
    ],
)
def test_a_latency_is_held_against_the_quantile_that_is_promised(
    promises: dict[str, tuple[float, float]], words: str, is_kept: bool
) -> None:
    seen = server_seen("http://gpu1:8000", told(**promises))
    line = top_frame.server_lines(seen, 80)[0].plain
    assert " ".join(words.split()) in " ".join(line.split())
    assert len(line) <= 80
    assert seen.tbt_ms.kept is seen.document()["tbt_ms"]["kept"] is is_kept


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Unreported("does not answer"), "does not answer"),
        (Unreported(OTHER_VERSION), "runs another version of ConServe"),
        (STOCK, "without ConServe's scheduler"),
        (report(slo={"harm": 0.1}), "harm ≤10%"),
        (report(), "no promise"),
        (report(online={"promises": {"ttft_ms": {"p99": UNSEEN}}}), "-/1,500"),
    ],
)
def test_a_server_is_shown_by_whatever_it_says(said: SchedulerReport | Unreported, words: str) -> None:
    lines = top_frame.server_lines(server_seen("http://gpu1:8000", said), 80)
    assert words in lines[0].plain
    assert max(len(line.plain) for line in lines) <= 80


def test_bars_courses_and_numbers_fit_their_cells() -> None:
    assert [bars.bar(share, 4) for share in (0, 0.5, 0.99, 1, 7)] == ["    ", "██  ", "███▉", "████", "████"]
    assert bars.course([0, 1, 2, 4], 6) == "  ▁▃▅█"
    assert bars.course([], 3) == "   "
    assert bars.course([0, 0], 3) == " ▁▁"
    assert [bars.short(n) for n in (7, 1480, 99_999, 100_000, 2_500_000, 25e9)] == [
        "7", "1,480", "99,999", "100k", "2.5M", "25G",
    ]  # fmt: skip
    assert (bars.cut("abc", 5), bars.cut("abcdef", 4)) == ("abc  ", "abc…")


# What is looked at.


def test_a_pace_is_that_of_the_last_seconds() -> None:
    pace = CounterRate()
    assert pace.now is None
    for second in range(21):
        pace.add(float(second), 100.0 * second if second <= 10 else 1000.0)
    assert pace.now == 0.0
    assert max(pace.course) == 100.0
    pace.add(21.0, 50.0)  # the counter began anew
    pace.add(22.0, 60.0)
    assert pace.now == 10.0


def test_a_slow_server_holds_nothing_up_and_is_asked_once_at_a_time(store: Store) -> None:
    asked: list[str] = []
    slow: Future[SchedulerReport | Unreported] = Future()

    def answer(url: str) -> SchedulerReport | Unreported:
        asked.append(url)
        return slow.result() if "slow" in url else REPORT

    looking = watch(answer, "http://slow", "http://quick/v1")
    try:
        for _ in range(3):
            seen = looking.look(wait_s=0.0)
        until(lambda: looking.look().servers[1].error is None)
        seen = looking.look()
        assert [server.url for server in seen.servers] == ["http://slow", "http://quick"]
        assert seen.servers[0].error == "is being asked"
        assert seen.servers[1].tokens_per_s == 1480.4
        assert asked.count("http://slow") == 1
        slow.set_result(Unreported("does not answer"))
        until(lambda: looking.look().servers[0].error == "does not answer")
    finally:
        looking.close()


def test_a_store_that_is_gone_is_named_and_the_last_jobs_stay(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submitted(write_input)
    looking = watch(REPORT)
    assert looking.look().error is None

    def gone(*_: Any, **__: Any) -> Any:
        raise StoreError("the store cannot be read; run: conserve doctor")

    monkeypatch.setattr(overview, "read_jobs", gone)
    seen = looking.look()
    looking.close()
    assert [job.id for job in seen.jobs] == [job_id]
    assert (seen.read, seen.rows_left) == (True, 2)
    assert any("conserve doctor" in line for line in plain(seen, ScreenState()))


def test_tokens_count_when_a_server_computes_them_not_when_their_rows_end(store: Store) -> None:
    now, tokens = [1e9], [0]

    def said(url: str) -> SchedulerReport:
        return report(offline={"tokens": tokens[0]})

    looking = StoreWatch(load(), ["http://a"], asking=lambda url, settings: said(url), clock=lambda: now[0])
    for _ in range(3):
        seen = looking.look(wait_s=60.0)
        now[0] += 1.0
        tokens[0] += 250
    looking.close()
    assert seen.tokens_per_s == 250.0
    assert list(seen.course) == [250.0, 250.0]


def test_a_password_is_not_shown() -> None:
    assert (
        load({"store": "postgresql+psycopg://me:secret@db/conserve"}).place
        == "postgresql+psycopg://db/conserve"
    )


# Once.


@pytest.mark.usefixtures("slow_servers")
def test_once_prints_jobs_and_servers_as_text_and_json(write_input: WriteInput) -> None:
    job_id = submitted(write_input)
    text = conserve("top", "--once", "--endpoint", "http://127.0.0.1:9")
    assert text.returncode == 0, text.stderr
    assert job_id in text.stdout
    assert "does not answer" in text.stdout
    assert "\x1b" not in text.stdout
    done = conserve("top", "--once", "--json", CONSERVE_ENDPOINT="http://127.0.0.1:9/v1")
    said = json.loads(done.stdout)
    assert [job["id"] for job in said["jobs"]] == [job_id]
    assert said["jobs"][0]["forecast"]["rows_left"] == said["rows_left"] == 2
    assert said["servers"][0]["url"] == "http://127.0.0.1:9"
    assert said["servers"][0]["error"]


def test_once_says_in_full_why_the_store_cannot_be_read_and_makes_no_figures_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = f"the store {'s3://lake/team-' * 6} cannot be read; run: conserve doctor --engine"

    def gone(*_: Any, **__: Any) -> Any:
        raise StoreError(why)

    monkeypatch.setattr(overview, "read_jobs", gone)
    text = conserve("top", "--once", "--endpoint", "http://127.0.0.1:9")
    assert text.returncode == 1
    assert "".join(why.split()) in "".join(text.stdout.split())
    assert max(map(len, text.stdout.splitlines())) <= top_frame.WIDTH
    assert "127.0.0.1:9 " in text.stdout, "servers are shown none the less"
    for made_up in ("no row waits", "no jobs yet", "rows left"):
        assert made_up not in text.stdout
    done = conserve("top", "--once", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["error"]) == (1, why)
    assert said["rows_left"] is said["jobs"] is said["tokens_per_s_by_quarter_hour"] is None


def test_a_servers_json_has_its_figures() -> None:
    assert server_seen("http://a", REPORT).document() == {
        "url": "http://a",
        "policy": "conserve",
        "age_s": None,
        "attainment": 0.98,
        "harm": None,
        "iterations_left": 12,
        "tokens_redone": 512,
        "tokens_restored": 96,
        "tokens_recomputed": 7,
        "ttft_ms": {"p99": 1601.0, "promised": 1500.0, "promise": "p99", "seen": 1601.0, "kept": False},
        "tbt_ms": {"p99": 88.0, "promised": 100.0, "promise": "p99", "seen": 88.0, "kept": True},
        "offline_tokens_per_s": 1480.4,
    }
    assert ServerSeen(url="u", error="gone").document() == {"url": "u", "error": "gone", "stock": False}
    assert Latency(None, 100.0).kept


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "conserve top --once"),
        (("--json",), "conserve top --once --json"),
        (("--once", "--endpoint", "gpu1:8000"), "http://"),
    ],
)
def test_what_cannot_be_shown_is_a_usage_error(flags: tuple[str, ...], words: str) -> None:
    done = conserve("top", *flags)
    assert done.returncode == 2
    assert words in done.stderr


# Keys.


def test_keys_are_named_and_others_are_passed_over() -> None:
    assert key_names("jp\x1b[A\x1bOB") == ["j", "p", "up", "down"]
    assert key_names("\x1b[5~q") == ["q"]
    assert key_names("\x1b") == ["\x1b"], "an arrow may come in two pieces"


def test_keys_choose_and_steer_a_job(write_input: WriteInput) -> None:
    job_id = submitted(write_input)
    seen = Overview(at=0.0, store="", jobs=read_jobs(load(), now=time.time()))
    context = Context()
    choice = top.with_shown_job(ScreenState(), seen)
    assert choice.job == job_id
    for key in ("down", "up", "j", "k"):
        assert top.after_key(key, choice, seen, context).job == job_id
    paused = top.after_key("p", choice, seen, context)
    assert (paused.message, paused.failed, state()) == (f"{job_id}: paused", False, "paused")
    assert top.after_key("r", choice, seen, context).message == f"{job_id}: queued"
    assert top.after_key("?", choice, seen, context).help
    assert top.after_key("a", choice, seen, context).everything
    assert conserve("cancel", job_id).returncode == 0
    refused = top.after_key("p", choice, seen, context)
    assert refused.failed
    assert "nothing to pause" in refused.message


def test_on_a_terminal_it_draws_pauses_and_gives_the_terminal_back(write_input: WriteInput) -> None:
    submitted(write_input)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    before = termios.tcgetattr(theirs)
    running = subprocess.Popen(
        [sys.executable, "-m", "conserve", "top"],
        stdin=theirs,
        stdout=theirs,
        cwd=REPOSITORY,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    try:
        drawn = b""
        while b"queued" not in drawn:
            drawn += os.read(ours, 65_536)
        os.write(ours, b"p")
        while b": paused" not in drawn:
            drawn += os.read(ours, 65_536)
        assert state() == "paused"
        os.write(ours, b"q")
        while b"\x1b[?1049l" not in drawn:
            drawn += os.read(ours, 65_536)
        assert running.wait() == 0
        assert drawn.startswith(b"\x1b[?1049h")
        assert termios.tcgetattr(theirs) == before
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)

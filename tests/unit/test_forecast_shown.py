"""The forecast where users see it: its command, status, submit, the batch object, /metrics, and from Python."""

import json
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import conserve as package
from conserve.batch_api.foresight import KEPT_S, Foresight
from conserve.cli.forecast_report import queue_sentence, sentence, warning, when
from conserve.config import load
from conserve.errors import UsageError
from conserve.jobs.deadlines.forecast import Forecast
from conserve.jobs.deadlines.queue import queued
from conserve.jobs.telemetry import queue_metrics
from conserve.store.books import catalog, harvested
from conserve.store.books.readings import read_jobs
from conserve.store.books.slots import SLOT_S
from conserve.store.books.states import JobState, OnLate
from conserve.store.database.store import Store
from tests import patient
from tests.batch_rig import client, create, live, reaches
from tests.commands import conserve
from tests.store_rows import add_job, claim_in, finish, job, leased


@pytest.fixture
def seen(store: Store) -> Store:
    """A store that harvested 10 tokens a second over the last day."""
    now = time.time()
    with store.write() as tx:
        for back in range(96, 0, -1):
            end = now - back * SLOT_S
            harvested.note(tx, 10 * SLOT_S, since=end - SLOT_S, now=end)
    return store


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command that submits a hundred rows, 500 tokens each for all that the store knows: 5,000 s."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"q": "a{n}"}}\n' for n in range(100)))
    return ["submit", str(tmp_path / "rows.jsonl"), "--prompt", "{{ q }}"]


def test_the_command_shows_when_jobs_are_done(seen: Store, words: list[str]) -> None:
    job_id = conserve(*words, "--within", "9h").stdout.strip()
    shown = conserve("forecast")
    assert "100 %" in shown.stdout
    assert shown.stderr == "none runs now; done by then if rows run from now on: conserve run\n"
    assert job_id in conserve("forecast", "last").stdout
    (shown,) = json.loads(conserve("forecast", "--json").stdout)
    assert (shown["job_id"], shown["rows_left"], shown["in_time"]) == (job_id, 100, 1.0)
    assert time.time() < datetime.fromisoformat(shown["done_50"]).timestamp() < time.time() + 9 * 3600
    assert shown["done_50"] < shown["done_90"] < shown["deadline"]
    assert re.search("forecast: all done by .*, if rows run from now on\n", conserve("status").stdout)
    assert "in time with 100 %, if rows run from now on\n" in conserve("status", job_id).stdout
    with seen.write() as tx:
        assert claim_in(tx, owner="me", now=time.time(), lease_s=60.0, limit=10) is not None
    assert re.search(r"forecast: all done by .*\(90 %\)\n", conserve("status").stdout)


def test_a_store_that_harvested_nothing_says_so(store: Store, words: list[str]) -> None:
    assert conserve("forecast").stderr == "no job has rows to run\n"
    done = conserve(*words, "--within", "9h", "--strict")
    assert done.returncode == 0
    assert "no forecast" in done.stderr
    assert conserve("forecast").stderr.startswith(
        "no forecast yet: it follows once rows have run for 15 s within"
    )
    (shown,) = json.loads(conserve("forecast", "--json").stdout)
    assert shown["done_50"] is None
    assert "forecast" not in conserve("status").stdout


def test_a_job_that_is_done_weeks_from_now_is_said_in_words() -> None:
    now = time.time()
    soon, far = (
        Forecast(done_50=now, done_90=None, in_time=0.4),
        Forecast(done_50=None, done_90=None, in_time=0.0),
    )
    at = when(now, now)
    assert sentence(far, None, now) == "done weeks from now (50 and 90 %)"
    assert sentence(soon, None, now) == f"done by {at} (50 %), weeks from now (90 %)"
    assert queue_sentence({"a": soon, "b": far}, now).startswith(
        "all done weeks from now (50 and 90 %); may miss"
    )
    assert f"by {at} (done weeks from now with 90 %)" in str(warning(soon, now, now))


def test_a_deadline_that_will_not_be_kept_is_warned_of_and_strictly_refused(
    seen: Store, words: list[str]
) -> None:
    done = conserve(*words, "--within", "10m")
    assert done.returncode == 0
    assert "warning: will not make it: 0 % by " in done.stderr
    assert "push" not in done.stderr
    refused = conserve(*words, "--within", "10m", "--strict")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "will not make it" in refused.stderr
    assert conserve(*words, "--within", "90h", "--strict").returncode == 0
    with seen.read() as tx:
        assert len(catalog.ids(tx)) == 2
    assert "may miss its deadline" in conserve("status").stdout


def test_a_push_is_said_to_depend_on_the_server(seen: Store, words: list[str]) -> None:
    queued = conserve(*words, "--within", "90h", "--on-late", "push")
    again = conserve("deadline", queued.stdout.strip(), "--within", "80h", "--on-late", "push")
    for said in (queued, again):
        assert "push: only where a server has --push-slo-scale above 1" in said.stderr
    assert again.stdout.rstrip().endswith(", push")


def test_what_becomes_of_a_late_job_is_chosen_and_changed(seen: Store, words: list[str]) -> None:
    job_id = conserve(*words, "--within", "9h", "--on-late", "best-effort").stdout.strip()
    assert job(seen, job_id).on_late is OnLate.BEST_EFFORT
    assert conserve("deadline", job_id).stdout.endswith("best-effort\n")
    conserve("deadline", job_id, "--within", "1h")
    assert job(seen, job_id).on_late is OnLate.BEST_EFFORT
    due = job(seen, job_id).deadline
    conserve("deadline", job_id, "--on-late", "expire")
    assert (job(seen, job_id).on_late, job(seen, job_id).deadline) == (OnLate.EXPIRE, due)
    for flags in (["--on-late", "expire"], ["--strict"], ["--within", "1h", "--on-late", "shove"]):
        wrong = conserve(*words, *flags)
        assert (wrong.returncode, wrong.stdout) == (2, "")


def test_a_job_of_best_effort_goes_on_after_its_deadline(store: Store) -> None:
    add_job(store, deadline=10.0, on_late=OnLate.BEST_EFFORT)
    with store.write() as tx:
        assert catalog.expire(tx, now=11.0) == []
    finish(store, leased(store, now=12.0))
    assert job(store).state is JobState.COMPLETED


def test_a_job_past_its_deadline_delays_none(store: Store) -> None:
    """It ends at the next look, whenever that is."""
    for name, on_late in (("late", OnLate.EXPIRE), ("pushed", OnLate.PUSH), ("on", OnLate.BEST_EFFORT)):
        add_job(store, name, rows=1000, deadline=10.0, on_late=on_late)
    add_job(store, "next", rows=10)
    listed = read_jobs(load({"home": store.home}, environ={}), now=9.0, kept=store)
    assert [job.id for job in queued(listed, now=9.0)] == ["late", "pushed", "on", "next"]
    assert [job.id for job in queued(listed, now=10.0)] == ["on", "next"]


def test_a_batch_shows_its_forecast_and_takes_what_becomes_of_it(
    seen: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_metrics, "WAIT_S", 60.0)
    with live(seen) as url:
        api = client(url)
        batch = create(api, ["one", "two"], extra_body={"on_late": "best-effort"})
        found = reaches(api, batch.id, "in_progress").to_dict()["conserve"]
        assert found["on_late"] == "best-effort"
        assert job(seen, found["job"]).on_late is OnLate.BEST_EFFORT
        assert found["forecast"]["in_time"] == 1.0
        assert time.time() < found["forecast"]["done_90"] < time.time() + 3600
        for none in ("shove", "push"):  # only jobs of `conserve submit` push
            with pytest.raises(Exception, match="on_late"):
                create(api, ["one"], extra_body={"on_late": none})
        page = patient.get(url.replace("/v1", "/metrics"))
    assert page.headers["content-type"].startswith("text/plain")
    shown = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    queue = f'queue="{seen.id[:8]}"'
    assert shown[f"conserve_backlog_jobs{{{queue}}}"] == "1.0"
    any_time = shown[f'conserve_backlog_seconds{{due_within="any",{queue}}}']
    assert float(any_time) == pytest.approx(100.0, rel=0.01)
    assert 0 < float(shown[f"conserve_deadline_load{{{queue}}}"]) < 0.01


def test_forecasts_are_made_now_and_then(seen: Store) -> None:
    now = [time.time()]
    foresight = Foresight(seen, lambda: now[0])
    first = foresight.now()
    add_job(seen)
    now[0] += KEPT_S - 1
    assert foresight.now() is foresight.recent is first
    now[0] += 2
    assert foresight.recent is None
    assert foresight.now().document("job-1") is not None
    assert foresight.now().document("no-such") is None


def test_a_look_at_the_queue_makes_no_forecasts(seen: Store) -> None:
    """Those of ten thousand jobs take seconds of a processor, and /metrics is read all day."""
    foresight = Foresight(seen, lambda: 1e9)
    assert foresight.queue() is foresight.queue() is not None
    assert foresight.recent is None


def test_from_python(seen: Store) -> None:
    opened = package.open()
    job_ = opened.submit([{"q": "a"}], prompt="{{ q }}", deadline=timedelta(hours=3), on_late="best-effort")
    assert job_.deadline is not None
    assert timedelta(hours=2) < job_.deadline - datetime.now(UTC) <= timedelta(hours=3)
    found = job_.forecast()
    assert found is not None
    assert found.in_time == 1.0
    moment = datetime.now(UTC) + timedelta(days=2)
    other = opened.submit([{"q": "b"}], prompt="{{ q }}", deadline=moment)
    assert other.deadline is not None
    assert abs(other.deadline - moment) < timedelta(seconds=1)
    assert opened.submit([{"q": "c"}], prompt="{{ q }}").deadline is None
    for wrong in ({"deadline": timedelta(0)}, {"deadline": timedelta(days=999)}, {"on_late": "expire"}):
        with pytest.raises(UsageError):
            opened.submit([{"q": "d"}], prompt="{{ q }}", **wrong)

"""A job and the model that answers it: bound by submit or the first run, and refused to any other."""

import asyncio
import csv
import io
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from conserve.api.binding import Binding
from conserve.cli.harvest import Announcer
from conserve.config import Settings, load, model_name
from conserve.endpoints.fake import FakeEndpoint, Script
from conserve.endpoints.protocol import Endpoint, model_of
from conserve.errors import SettingsError
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.harvest.tally import Tally
from conserve.jobs.task import Kind, Task
from conserve.owners import this_process
from conserve.store.books import catalog, choice, leases, queue, results, saved_tokens
from conserve.store.books.leases import Terms
from conserve.store.books.readings import read_jobs
from conserve.store.books.saved_tokens import SavedTokens
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql.query import views
from tests import virtual_time
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.ledgers import ledger_of
from tests.store_rows import add_job, claim_in, finish, leased
from tests.submitting import submit

PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}")
ONE, OTHER = "fake:?model=one&identity=one@1", "fake:?model=other&identity=other@2"


def queue_up(write_input: WriteInput, *flags: str, rows: int = 4) -> str:
    path = write_input(f"{len(flags)}-{rows}.parquet", q=[f"question {n}" for n in range(rows)])
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def harvest(store: Store, model: str, *, stop_after_s: float | None = None, **named: Any) -> Tally:
    async def run() -> Tally:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        if stop_after_s is not None:
            loop.call_later(stop_after_s, stop.set)
        endpoint = FakeEndpoint(Script(model=model, identity=f"{model}@1", capacity=4, token_ms=10))
        return await Harvester(store, endpoint, clock=loop.time, **named).run(stop)

    return virtual_time.run(run())


def bound(store: Store, job_id: str) -> str | None:
    with store.read() as tx:
        return catalog.get(tx, job_id).model


def reading(settings: Settings) -> Any:
    (found,) = read_jobs(settings, now=0.0)
    return found


def test_the_first_run_binds_a_job_and_another_model_is_refused(
    store: Store, write_input: WriteInput
) -> None:
    job_id = queue_up(write_input, rows=40)
    assert bound(store, job_id) is None
    harvest(store, "one", stop_after_s=0.1)
    assert bound(store, job_id) == "one"
    done_before = reading(load()).done
    assert 0 < done_before < 40
    done = conserve("run", "--endpoint", OTHER)
    assert done.returncode == 1
    (refused,) = [line for line in done.stderr.splitlines() if "refused" in line]
    assert f"job {job_id} is bound to one and this run has other; give --model one, or --rebind" in refused
    after = reading(load())
    assert (after.done, after.state) == (done_before, "queued")
    assert conserve("run", "--endpoint", ONE).returncode == 0
    models = {json.loads(line)["model"] for line in conserve("results", job_id).stdout.splitlines()}
    assert models == {"one"}


def test_a_job_is_bound_by_submit(store: Store, write_input: WriteInput) -> None:
    job_id = queue_up(write_input, "--model", "one")
    assert bound(store, job_id) == "one"
    assert conserve("run", job_id, "--endpoint", OTHER).returncode == 1
    assert json.loads(conserve("status", job_id, "--json").stdout)["model"] == "one"
    assert "model       one" in conserve("status", job_id).stdout
    assert conserve("run", job_id, "--endpoint", ONE).returncode == 0


def test_a_run_that_answered_nothing_frees_the_jobs_it_bound(store: Store, write_input: WriteInput) -> None:
    free, by_submit = queue_up(write_input), queue_up(write_input, "--model", "one", rows=3)
    harvest(store, "one", stop_after_s=0.005)
    with store.read() as tx:
        assert catalog.get(tx, free).started_at is not None  # rows of it were leased
        assert not queue.backlog(tx).leased
    assert (bound(store, free), bound(store, by_submit)) == (None, "one")
    done = conserve("run", free, "--endpoint", OTHER)
    assert done.returncode == 0, done.stderr
    assert bound(store, free) == "other"


@pytest.mark.parametrize("kept", ["answer", "tokens", "lease", None])
def test_a_job_that_its_model_has_done_something_for_stays_bound(store: Store, kept: str | None) -> None:
    """A row that failed is none: it may never have been sent."""
    job_id = add_job(store)
    lease = leased(store, limit=2, model="one")
    finish(store, lease, of=[0], failed=[] if kept == "answer" else [0])
    with store.write() as tx:
        if kept == "tokens":
            saved_tokens.save_tokens(tx, [SavedTokens(lease.epoch, job_id, 1, b"[1]", "one@1")])
        if kept != "lease":
            leases.abandon(tx, ["ann"])
        catalog.unbind(tx)
    assert bound(store, job_id) == ("one" if kept else None)


def test_the_last_of_several_runs_without_an_answer_frees_the_job(
    store: Store, write_input: WriteInput
) -> None:
    """The second one saw the job when it was bound already."""
    job_id = queue_up(write_input)
    first, second = (ledger_of(store, model="typo") for _ in range(2))
    second.owner = "bob"
    assert first.claim(1, False, "typo@1")
    assert second.claim(1, False, "typo@1")
    first.give_back()
    assert bound(store, job_id) == "typo"
    second.give_back()
    assert bound(store, job_id) is None
    first.close()
    second.close()


def test_a_run_that_was_killed_before_its_first_answer_leaves_the_job_to_any_model(
    store: Store, write_input: WriteInput
) -> None:
    job_id = queue_up(write_input)
    host, pid, _, nonce = this_process().rsplit(":", 3)
    killed = ledger_of(store, model="typo")
    killed.owner = f"{host}:{pid}:1.00:{nonce}"  # of a process that began just after the boot
    assert killed.claim(1, False, "typo@1")
    killed.close()
    assert bound(store, job_id) == "typo"
    assert conserve("run", job_id, "--endpoint", ONE).returncode == 0
    assert bound(store, job_id) == "one"


def test_a_job_bound_by_an_earlier_version_stays_bound(store: Store) -> None:
    """Nobody knows whether a user named its model."""
    job_id = add_job(store)
    leased(store, model="one")
    with store.write() as tx:
        tx.execute(text("update job set bound_by_run = null"))
        leases.abandon(tx, ["ann"])
        catalog.unbind(tx)
    assert bound(store, job_id) == "one"


def test_a_claim_under_way_keeps_the_job_bound(store: Store) -> None:
    """The end of a run waits for the claim, and then sees its lease."""
    if store.engine.dialect.name == "sqlite":
        pytest.skip("one transaction writes at a time")
    job_id = add_job(store)
    leased(store, model="one")
    with store.write() as tx:
        leases.abandon(tx, ["ann"])
    freed = threading.Thread(target=free, args=(store,))
    with store.write() as tx:
        assert claim_in(tx, owner="bob", now=0.0, lease_s=60.0, limit=2, model="one") is not None
        freed.start()
        while not tx.scalar(text("select count(*) from pg_locks where not granted")):
            pass
    freed.join()
    assert bound(store, job_id) == "one"


def free(store: Store) -> None:
    with store.write() as tx:
        catalog.unbind(tx)


def test_rebinding_lets_another_model_answer_the_rest(store: Store, write_input: WriteInput) -> None:
    job_id = queue_up(write_input, rows=40)
    harvest(store, "one", stop_after_s=0.1)
    done = conserve("run", job_id, "--endpoint", OTHER, "--rebind")
    assert done.returncode == 0, done.stderr
    assert bound(store, job_id) == "other"
    rows = [json.loads(line) for line in conserve("results", job_id).stdout.splitlines()]
    assert {(row["model"], row["engine"]) for row in rows} == {("one", "one@1"), ("other", "other@2")}


def test_rebinding_leaves_jobs_alone_that_the_run_is_not_for(store: Store, write_input: WriteInput) -> None:
    ours, theirs = queue_up(write_input, "--model", "one"), queue_up(write_input, "--model", "one", rows=3)
    assert conserve("run", ours, "--endpoint", OTHER, "--rebind").returncode == 0
    assert (bound(store, ours), bound(store, theirs)) == ("other", "one")


def test_a_run_does_what_it_may_and_refuses_the_rest(store: Store, write_input: WriteInput) -> None:
    theirs, ours = queue_up(write_input, "--model", "one"), queue_up(write_input, rows=3)
    done = conserve("run", "--endpoint", OTHER, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["jobs"] == {ours: "completed"}
    assert list(told["refused"]) == [theirs]


def test_a_run_whose_model_was_not_named_takes_the_jobs(write_input: WriteInput) -> None:
    queue_up(write_input, "--model", "one")
    jobs = read_jobs(load(), now=0.0)
    assert Binding().settled(load(), jobs).model == "one"
    assert Binding(named=True).settled(load({"endpoint": "http://x"}), jobs).model is None
    asked = load({"model": "smollm2-demo", "endpoint": "http://x"})
    assert Binding().settled(asked, jobs).model == "smollm2-demo", "a name that was given is asked for"
    assert Binding().settled(load({"model": "other", "endpoint": "http://x"}), jobs).model == "other"
    queue_up(write_input, "--model", "two", rows=2)
    assert Binding().settled(load(), read_jobs(load(), now=0.0)).engine_model == "smollm2-demo"


def test_the_embedded_engine_is_not_started_for_another_models_job(write_input: WriteInput) -> None:
    job_id = queue_up(write_input, "--model", "one")
    done = conserve("run", "--model", "other")
    assert (done.returncode, done.stdout) == (1, "")
    (said,) = done.stderr.splitlines()
    assert f"job {job_id} is bound to one and this run has other" in said


def test_a_harvester_that_follows_leaves_other_models_jobs_to_others(
    store: Store, write_input: WriteInput
) -> None:
    theirs, ours = queue_up(write_input, "--model", "one"), queue_up(write_input, rows=3)
    harvest(store, "other", follow=True, stop_after_s=8.0)
    states = {job.id: job.state for job in read_jobs(load(), now=0.0)}
    assert states == {theirs: "queued", ours: "completed"}


def test_a_refusal_ends_with_its_reason(store: Store, write_input: WriteInput) -> None:
    """Another process answers the other model's job while this one still works on its own."""
    theirs, ours = queue_up(write_input, "--model", "one"), queue_up(write_input, rows=3)
    tally = Tally()
    ledger = ledger_of(store, tally, model="other")
    ledger.nothing_left()
    assert list(tally.refused) == [theirs]
    harvest(store, "one", only=[theirs])
    ledger.nothing_left()
    ledger.close()
    assert tally.refused == {}
    assert bound(store, ours) is None


def test_a_harvester_says_once_which_jobs_it_leaves_alone(
    store: Store, write_input: WriteInput, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its start, also beside a progress bar, while it answers other jobs."""
    job_id = queue_up(write_input, "--model", "one")
    tally = Tally()
    ledger = ledger_of(store, tally, model="other")
    ledger.recover()
    ledger.close()
    harvester = Harvester(store, FakeEndpoint(Script(model="other")), follow=True)
    announcer = Announcer(harvester, load(), jobs=False)
    harvester.tally.refused |= tally.refused
    for _ in range(2):
        asyncio.run(announcer._look())
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"left alone: job {job_id} is bound to one and this run has other")


def test_a_run_does_not_wait_for_rows_that_another_model_holds(store: Store, write_input: WriteInput) -> None:
    queue_up(write_input, "--model", "one")
    with store.write() as tx:
        assert claim_in(tx, owner="far:1:0:x", now=0.0, lease_s=1e9, limit=2, model="one")
    tally = harvest(store, "other")
    assert len(tally.refused) == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_claim_binds_in_the_same_transaction(store: Store, several: bool) -> None:
    jobs = [add_job(store, f"job-{n}") for n in range(2 if several else 1)]

    def claim(model: str) -> list[str]:
        with store.write() as tx:
            if not several:
                lease = claim_in(tx, owner="ann", now=0.0, lease_s=9.0, limit=1, model=model)
                return [lease.job_id] if lease else []
            wanted = [(job, n) for n, job in enumerate(jobs)]
            return [lease.job_id for lease in choice.choose(tx, wanted, Terms("ann", 0.0, 9.0, model))]

    assert claim("one") == jobs
    assert claim("other") == []
    assert {bound(store, job) for job in jobs} == {"one"}
    with store.write() as tx:
        assert queue.runnable_jobs(tx, None, "other") == []
        assert [job.id for job in queue.runnable_jobs(tx, None, "one")] == jobs


def test_a_claim_that_was_rolled_back_binds_nothing(store: Store) -> None:
    class Mistake(Exception):
        pass

    add_job(store)

    def claim_and_fail() -> None:
        with store.write() as tx:
            claim_in(tx, owner="ann", now=0.0, lease_s=9.0, limit=1, model="one")
            raise Mistake

    with pytest.raises(Mistake):
        claim_and_fail()
    assert bound(store, "job-1") is None


def test_a_name_that_is_no_text_is_no_model() -> None:
    with pytest.raises(SettingsError, match="is no name of a model; correct it"):
        model_name("a\udcff")


def test_a_folder_is_one_model_wherever_it_is_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    named = [
        model_name(name) for name in ("models/mine", "./models/mine/", str(tmp_path / "models" / "mine"))
    ]
    assert named == [str((tmp_path / "models" / "mine").resolve())] * 3
    assert model_name("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"
    assert model_name("~nobody/at/all\0") == "~nobody/at/all\0"


def test_an_endpoint_without_a_name_goes_by_its_identity() -> None:
    class Plain(Endpoint):
        identity = "plain@1"

    assert model_of(Plain()) == "plain@1"
    assert model_of(FakeEndpoint(Script(model="named"))) == "named"


def test_results_name_model_and_engine_in_every_format(store: Store, write_input: WriteInput) -> None:
    job_id = queue_up(write_input)
    assert conserve("run", "--endpoint", ONE).returncode == 0

    def written(format: str) -> str:
        return conserve("results", job_id, "--format", format).stdout

    assert {(row["model"], row["engine"]) for row in map(json.loads, written("jsonl").splitlines())} == {
        ("one", "one@1")
    }
    assert {row["engine"] for row in csv.DictReader(io.StringIO(written("csv")))} == {"one@1"}
    bodies = [json.loads(line)["response"]["body"] for line in written("openai").splitlines()]
    assert {(body["model"], body["system_fingerprint"]) for body in bodies} == {("one", "one@1")}
    told = conserve(
        "sql", "--json", "select distinct r.engine, j.model from results r join jobs j on j.id = r.job_id"
    )
    assert json.loads(told.stdout) == {"engine": "one@1", "model": "one"}


def test_shards_and_journals_of_older_stores_are_read(store: Store) -> None:
    """A shard without the column, a payload without the field, and new ones beside them."""
    add_job(store, rows=3)
    lease = leased(store)
    finish(store, lease, of=[0], engine="one@1")
    with store.write() as tx:
        shards_of = tx.execute(text("select payload from journal")).scalar_one()
    from conserve.store.books import shards

    shards.compact(store, "job-1", now=0.0)
    (file,) = (layout.job_folder(store.home, "job-1") / layout.RESULTS).iterdir()
    pq.write_table(pq.read_table(file).drop_columns(["engine"]), file)
    with store.write() as tx:
        tx.execute(text("update shard set digest = null, bytes = null"))
    finish(store, lease, of=[1], engine="one@1")
    shards.compact(store, "job-1", now=0.0)
    finish(store, lease, of=[2], engine="one@1")
    old = json.loads(shards_of)
    del old["engine"]
    assert results.decode(json.dumps(old).encode()).engine is None
    with views(store, now=0.0) as opened:
        found = opened.duck.execute("select row_index, engine, text from results order by 1").fetchall()
    assert found == [(0, None, "yes"), (1, "one@1", "yes"), (2, "one@1", "yes")]


def without_models(settings: Settings) -> None:
    """Make the store one of the version before."""
    with sqlite3.connect(settings.home / "conserve.db") as database:
        for column in ("model", "tags"):
            database.execute(f"alter table job drop column {column}")
        database.execute("update meta set value = '2' where key = 'version'")
    database.close()


@pytest.mark.sqlite
def test_an_older_store_is_read_as_it_is_and_brought_up_to_date_by_what_writes(
    store: Store, settings: Settings, write_input: WriteInput
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), PROMPT).job_id
    store.close()
    without_models(settings)
    assert json.loads(conserve("status", job_id, "--json").stdout)["model"] is None
    assert json.loads(conserve("jobs", "--json").stdout)[0]["tags"] == {}
    assert conserve("run", "--endpoint", ONE).returncode == 0
    assert reading(settings).model == "one"

"""The request of a row, and the row's place: the view `requests`, `conserve show`, `--with-prompts`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from conserve.endpoints.protocol import Url
from conserve.errors import StoreDamaged
from conserve.jobs.requests.lookup import find_request
from conserve.jobs.requests.wording import Tasks, prompt_text
from conserve.jobs.task import Kind, Order, Task
from conserve.store.books import catalog, choice, shards
from conserve.store.books.leases import Terms
from conserve.store.books.standing import standing
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql.query import views
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.store_rows import finish, leased, positions, put_back
from tests.store_rows import job as record
from tests.submitting import submit

PROMPT = Task(kind=Kind.PROMPT, template="Say {{ q }}", id_column="q", params={"max_tokens": 7})


def asked(store: Store, sql: str) -> list[tuple[Any, ...]]:
    with store.read() as tx:
        tasks = Tasks(catalog.everything(tx))
    with views(store, now=0.0, wording=tasks) as opened:
        return opened.duck.execute(sql).fetchall()


def test_a_job_is_shown_as_it_was_asked(store: Store, write_input: WriteInput) -> None:
    job_id = submit(
        store, str(write_input(q=["b", "a"])), Task(**{**vars_of(PROMPT), "order": Order.PREFIX})
    ).job_id
    rows = asked(store, "select * exclude (body), body::varchar from requests order by row_index")
    body = '{"max_tokens":7,"messages":[{"role":"user","content":"Say %s"}]}'
    assert rows == [
        (job_id, 1, 0, "b", "Say b", "waiting", 0, None, body % "b"),
        (job_id, 0, 1, "a", "Say a", "waiting", 0, None, body % "a"),
    ]


def vars_of(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in Task.__slots__}


CHATS = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]]
PARTS = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.mark.parametrize(
    ("task", "payload", "prompt"),
    [
        (Task(kind=Kind.PROMPT, system="S"), "hello", "hello"),
        (Task(kind=Kind.PROMPT, url=Url.COMPLETIONS), "hello", "hello"),
        (Task(kind=Kind.MESSAGES), json.dumps(CHATS[0]), "system: Be brief.\n\nuser: Hi"),
        (Task(kind=Kind.MESSAGES, system="S"), json.dumps(CHATS[0][1:]), "system: S\n\nuser: Hi"),
        (Task(kind=Kind.OPENAI), json.dumps({"messages": CHATS[0][1:]}), "Hi"),
        (
            Task(kind=Kind.OPENAI),
            json.dumps({"messages": [{"role": "user", "content": PARTS}]}),
            "Look:\n[image_url]",
        ),
        (Task(kind=Kind.OPENAI), json.dumps({"prompt": "hello"}), "hello"),
        (Task(kind=Kind.OPENAI), json.dumps({"prompt": [1, 2]}), "[1,2]"),
        (Task(kind=Kind.OPENAI), json.dumps({"messages": "none"}), None),
    ],
)
def test_each_kind_of_request_has_its_text(task: Task, payload: str, prompt: str | None) -> None:
    tasks = Tasks([Named("j", task.to_json())])  # type: ignore[list-item]
    assert tasks.prompt("j", payload) == prompt
    assert json.loads(tasks.body("j", payload) or "") == task.body(payload)


class Named(NamedTuple):
    """The part of a job that a request's wording follows from."""

    id: str
    task: str


def test_a_job_of_another_version_has_no_wording() -> None:
    tasks = Tasks([Named("j", '{"kind": "of tomorrow"}'), Named("k", "{")])  # type: ignore[list-item]
    for job_id in ("j", "k"):
        assert (tasks.body(job_id, "x"), tasks.prompt(job_id, "x")) == (None, None)
    tasks = Tasks([Named("j", Task(kind=Kind.OPENAI).to_json())])  # type: ignore[list-item]
    assert tasks.prompt("j", "no JSON") is None


def test_odd_messages_have_some_text() -> None:
    assert prompt_text({"messages": [{"role": "user", "content": None}, "x", {"content": ["y"]}]}) == (
        "user: null\n\nNone: y"
    )
    assert prompt_text({}) is None


def test_every_state_of_a_row_is_shown(store: Store, write_input: WriteInput) -> None:
    submit(store, str(write_input(q=[str(n) for n in range(6)])), PROMPT)
    lease = leased(store, limit=5)
    finish(store, lease, of=[0, 1], failed=[1])
    put_back(store, lease, 2, failed=True)
    rows = asked(store, "select row_index, state, attempts, error from requests order by row_index")
    assert rows == [
        (0, "succeeded", 1, None),
        (1, "failed", 1, "no"),
        (2, "waiting", 1, None),
        (3, "running", 1, None),
        (4, "running", 1, None),
        (5, "waiting", 0, None),
    ]
    with store.write() as tx:
        catalog.move(tx, "input", "cancel", now=0.0)
    states = asked(store, "select state from requests order by row_index")
    assert [state for (state,) in states] == ["succeeded", "failed", *["cancelled"] * 4]


def test_rows_that_could_not_be_rendered_say_why(store: Store, write_input: WriteInput) -> None:
    submit(store, str(write_input(q=["a", None])), PROMPT)
    ((body, prompt, error),) = asked(store, "select body, prompt, error from requests where row_index = 1")
    assert (body, prompt) == (None, None)
    assert "prints a null" in error


def test_sql_shows_requests(store: Store, write_input: WriteInput) -> None:
    submit(store, str(write_input(q=["a"])), PROMPT)
    done = conserve("sql", "--json", "select body, body->>'$.max_tokens' as n, prompt from requests")
    assert json.loads(done.stdout) == {
        "body": {"max_tokens": 7, "messages": [{"role": "user", "content": "Say a"}]},
        "n": "7",
        "prompt": "Say a",
    }


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_results_carry_their_prompts(
    store: Store, write_input: WriteInput, tmp_path: Path, ending: str
) -> None:
    submit(store, str(write_input(q=["b", "a"], prompt=["theirs", "theirs"])), PROMPT)
    finish(store, leased(store))
    out = tmp_path / f"out.{ending}"
    done = conserve("results", "last", "--with-prompts", "--with-inputs", "-o", str(out))
    assert done.returncode == 0, done.stderr
    if ending == "parquet":
        rows = pq.read_table(out).to_pylist()
    elif ending == "jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        import csv

        rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["q"], row["prompt"], row["input_prompt"]) for row in rows] == [
        ("b", "Say b", "theirs"),
        ("a", "Say a", "theirs"),
    ]


def test_prompts_that_are_gone_are_a_sentence(store: Store, write_input: WriteInput) -> None:
    job_id = submit(store, str(write_input(q=["a"])), PROMPT).job_id
    finish(store, leased(store))
    layout.requests_file(store.home, job_id).unlink()
    done = conserve("results", job_id, "--with-prompts")
    assert (done.returncode, done.stdout) == (2, "")
    assert "requests.parquet is missing; leave out --with-prompts" in done.stderr
    assert conserve("results", job_id).returncode == 0
    done = conserve("show", job_id, "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be read" in done.stderr


def test_a_row_of_damaged_requests_is_not_found_with_a_sentence(
    store: Store, write_input: WriteInput
) -> None:
    job_id = submit(store, str(write_input(q=["a"])), PROMPT).job_id
    path = layout.requests_file(store.home, job_id)
    whole = path.read_bytes()
    path.write_bytes(whole[:6] + b"\0" * 9 + whole[15:])
    with pytest.raises(StoreDamaged, match=f"cannot be read .*; run: conserve check {job_id}"):
        find_request(store, record(store, job_id), row_index=0)


def test_a_row_stands_in_a_shard_of_an_earlier_version_and_where_retry_put_it(
    store: Store, write_input: WriteInput
) -> None:
    job_id = submit(store, str(write_input(q=["a", "b"])), PROMPT).job_id
    finish(store, leased(store), failed=(1,))
    shards.compact(store, job_id, now=0.0)
    for path in (store.home / "jobs" / job_id / "results").iterdir():
        pq.write_table(pq.read_table(path).drop(["engine"]), path)
    with store.write() as tx:
        tx.execute(text("update shard set digest = null, bytes = null"))
    found = [standing(store, record(store, job_id), position) for position in (0, 1)]
    assert [(row.state, row.result and row.result.engine) for row in found] == [
        ("succeeded", None),
        ("failed", None),
    ]
    shards.retry_failed(store, job_id, now=5.0)
    row = standing(store, record(store, job_id), 1)
    assert (row.state, row.attempts) == ("waiting", 0)
    assert row.where == "put back by conserve retry or check --repair, and not taken since"


class TestShow:
    """`conserve show JOB ROW`."""

    @pytest.fixture
    def job(self, store: Store, write_input: WriteInput) -> str:
        return submit(store, str(write_input(q=[f"q{n}" for n in range(6)])), PROMPT).job_id

    def shown(self, *arguments: str) -> dict[str, Any]:
        done = conserve("show", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def test_a_row_that_was_too_long_is_shown_with_what_helps(self, store: Store, job: str) -> None:
        lease = leased(store, limit=2)
        finish(store, lease, of=[0], failed=(0,), error_type="too_long")
        finish(store, lease, of=[1])
        said = conserve("show", job, "0").stdout
        assert (
            f"what helps:\nthe row fails again unless the context is longer: conserve retry {job}, then"
            in said
        )
        assert "what helps" not in conserve("show", job, "1").stdout

    def test_a_row_on_its_way(self, store: Store, job: str) -> None:
        row = self.shown(job, "5")
        assert (row["state"], row["where"]) == ("waiting", "not taken yet; 5 rows of its job go first")
        assert self.shown(job, "1")["where"] == "not taken yet; 1 row of its job goes first"
        assert self.shown(job, "0")["where"] == "not taken yet; it is the next of its job"
        lease = leased(store, limit=4)
        row = self.shown(job, "1")
        assert (row["state"], row["where"], row["attempts"]) == ("running", "leased by ann", 1)
        put_back(store, lease, 1, failed=True)
        assert self.shown(job, "1")["where"] == "came back"
        put_back(store, lease, 2, suspect=True)
        assert (
            self.shown(job, "2")["where"]
            == "came back, to run alone since an engine or a harvester died with it"
        )
        finish(store, lease, of=[0, 3], failed=[3], model="m", prompt_tokens=3)
        row = self.shown(job, "0")
        assert (row["state"], row["where"], row["text"], row["model"]) == (
            "succeeded",
            "in the journal",
            "yes",
            "m",
        )
        assert (row["submitted_at"], row["finished_at"]) == (
            self.shown(job, "5")["submitted_at"],
            "1970-01-01T00:00:02+00:00",
        )
        shards.compact(store, job, now=0.0)
        row = self.shown(job, "3")
        assert row["where"].startswith("in the shard 000000000003-")
        assert (row["state"], row["error_type"], row["error"]) == ("failed", "scripted", "no")
        with store.write() as tx:
            catalog.move(tx, job, "cancel", now=0.0)
        assert self.shown(job, "5")["state"] == "cancelled"

    def test_saved_tokens_are_counted(self, store: Store, job: str) -> None:
        from conserve.store.books import saved_tokens

        lease = leased(store, limit=1)
        saved = saved_tokens.SavedTokens(lease.epoch, job, 0, saved_tokens.pack_tokens(range(64)), "m")
        with store.write() as tx:
            saved_tokens.save_tokens(tx, [saved])
        assert self.shown(job, "0")["where"] == "leased by ann, 64 tokens of its answer saved"

    def test_what_was_asked(self, job: str) -> None:
        row = self.shown(job, "--id", "q3")
        assert (row["row_index"], row["custom_id"], row["prompt"]) == (3, "q3", "Say q3")
        assert row["body"] == {"max_tokens": 7, "messages": [{"role": "user", "content": "Say q3"}]}

    def test_a_person_sees_the_same(self, store: Store, job: str) -> None:
        finish(store, leased(store), finish_reason="stop", model="m", prompt_tokens=1234)
        shown = conserve("show", job, "3").stdout
        assert shown.startswith(f"{job} row 3: succeeded\n")
        assert "\nprompt:\nSay q3\n" in shown
        assert shown.endswith("\nanswer:\nyes\n")
        assert "  tokens    1,234 prompt (0 cached), 0 completion" in shown
        assert "  finished  1970-01-01" in shown

    def test_several_answers_and_errors(self, store: Store, job: str) -> None:
        choices = '[{"text": "one"}, {"text": "two"}]'
        finish(store, leased(store), failed=[1], choices=choices)
        assert conserve("show", job, "0").stdout.endswith("\nanswer:\n[0] one\n[1] two\n")
        assert conserve("show", job, "1").stdout.endswith("\nerror (scripted):\nno\n")

    def test_a_damaged_shard_is_said(self, store: Store, job: str) -> None:
        finish(store, leased(store))
        shards.compact(store, job, now=0.0)
        (path,) = (layout.job_folder(store.home, job) / layout.RESULTS).glob("*.parquet")
        path.write_bytes(path.read_bytes()[:100])
        row = self.shown(job, "3")
        assert row["state"] == "unreadable"
        assert row["where"] == f"in a file that cannot be read ({path.name}); run: conserve check --repair"

    def test_a_row_that_was_passed_over(self, store: Store, job: str) -> None:
        with store.write() as tx:
            (lease,) = choice.choose(tx, [(job, 1), (job, 3)], Terms("ann", 0.0, 9.0))
        row = self.shown(job, "2")
        assert (row["state"], row["attempts"]) == ("waiting", 0)
        assert row["where"] == "not taken yet; rows behind it were chosen first"
        assert self.shown(job, "3")["where"] == "leased by ann"
        put_back(store, lease, 3)
        row = self.shown(job, "3")
        assert (row["state"], row["where"], row["attempts"]) == ("waiting", "came back", 1)
        assert positions(leased(store, owner="ben", limit=3)) == [0, 2, 3]
        row = self.shown(job, "3")
        assert (row["state"], row["where"], row["attempts"]) == ("running", "leased by ben", 2)

    def test_rows_of_a_job_that_expired(self, store: Store, job: str) -> None:
        lease = leased(store, limit=3)
        put_back(store, lease, 0)
        finish(store, lease, of=[1])
        with store.write() as tx:
            tx.execute(text("update job set state = 'expired'"))
        assert [self.shown(job, row)["state"] for row in "0125"] == [
            "cancelled",
            "succeeded",
            "running",
            "cancelled",
        ]

    @pytest.mark.parametrize(
        ("state", "place"),
        [
            ("expired", "its job expired; take up the rows that are left with: conserve retry {}"),
            ("cancelled", "its job was cancelled; submit it again to run it"),
            ("paused", "{row}; its job is paused; let it go on with: conserve resume {}"),
            ("failed", "{row}; its job was refused; try it again with: conserve resume {}"),
        ],
    )
    def test_a_row_of_a_job_that_goes_on_no_more_says_why(
        self, store: Store, job: str, state: str, place: str
    ) -> None:
        put_back(store, leased(store, limit=1), 0)
        with store.write() as tx:
            tx.execute(text("update job set state = :state"), {"state": state})
        for row, without in (("0", "came back"), ("1", "not taken yet; it is the next of its job")):
            assert self.shown(job, row)["where"] == place.format(job, row=without)
        said = conserve("--home", str(store.home), "show", job, "1").stdout
        assert (f"with: conserve --home {store.home} " in said) == (state != "cancelled")

    def test_a_row_reads_alike_in_the_journal_and_in_a_shard(self, store: Store, job: str) -> None:
        finish(store, leased(store), attempts=3, started_at=1.25, finished_at=1e9 + 0.5, model="m", text="é")
        before = self.shown(job, "2")
        shards.compact(store, job, now=0.0)
        after = self.shown(job, "2")
        assert before["where"] != after.pop("where")
        assert (before.pop("where"), before["attempts"]) == ("in the journal", 3)
        assert after == before

    def test_a_damaged_result_in_the_journal_is_said(self, store: Store, job: str) -> None:
        finish(store, leased(store))
        with store.write() as tx:
            tx.execute(text("update journal set checksum = checksum + 1 where position = 2"))
        row = self.shown(job, "2")
        assert (row["state"], row["text"], row["attempts"]) == ("unreadable", None, 0)
        assert row["where"] == "in a file that cannot be read (the journal); run: conserve check --repair"
        assert self.shown(job, "1")["state"] == "succeeded"

    def test_damage_of_a_shard_costs_its_own_rows_alone(self, store: Store, job: str) -> None:
        """The shard can be read still, but is not the file that was written."""
        lease = leased(store, limit=4)
        names = []
        for of in ([0, 1], [2, 3]):
            finish(store, lease, of=of)
            shards.compact(store, job, now=0.0)
            with store.read() as tx:
                names.append(Path(shards.files(tx)[-1].file).name)
        with store.write() as tx:
            tx.execute(text("update shard set digest = 'x' where id = (select min(id) from shard)"))
        assert f"({names[0]})" in self.shown(job, "1")["where"]
        assert self.shown(job, "2")["where"] == f"in the shard {names[1]}"
        with store.write() as tx:
            tx.execute(text("delete from shard where digest = 'x'"))
        assert "(a shard that is not recorded)" in self.shown(job, "1")["where"]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["6"], "has no row 6; its rows go from 0 to 5"),
            ([str(1 << 64)], "has no row 18446744073709551616; its rows go from 0 to 5"),
            (["--id", "nope"], "no row of job input-"),
            (["--id", "\udcff"], "no row of job input-"),
            ([], "name one row"),
            (["1", "--id", "q1"], "name one row"),
        ],
    )
    def test_a_mistake_is_a_sentence(self, job: str, arguments: list[str], words: str) -> None:
        done = conserve("show", job, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr

    def test_a_row_that_could_not_be_rendered(self, store: Store, write_input: WriteInput) -> None:
        job = submit(store, str(write_input("nulls.parquet", q=["a", None])), PROMPT).job_id
        row = self.shown(job, "1")
        assert (row["body"], row["prompt"], row["error_type"]) == (None, None, "template")
        assert "prints a null" in conserve("show", job, "1").stdout

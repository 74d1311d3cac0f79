"""Orders from submit to results: rows run in one order and come back in another."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from conserve.endpoints.fake import WORDS, FakeEndpoint, Script, answer_tokens, request_text
from conserve.endpoints.protocol import Call, Completion, OnTokens, Url
from conserve.errors import InputError
from conserve.jobs.harvest.harvester import Harvester
from conserve.jobs.inputs import parquet_rows
from conserve.jobs.requests import external_sort
from conserve.jobs.requests.file import RequestFile
from conserve.jobs.requests.order import prompt_key, token_text
from conserve.jobs.requests.rendering import RenderedRow
from conserve.jobs.requests.submit import slug
from conserve.jobs.task import Kind, Order, Task
from conserve.store.books import catalog
from conserve.store.books.readings import row_order
from conserve.store.database.store import Store
from conserve.store.files import layout
from conserve.store.sql.query import views
from tests.commands import conserve
from tests.conftest import WriteInput
from tests.submitting import submit

QUESTIONS = ["b 2", "a 1", None, "b 1", "REJECT", "a 2", None, "a 1"]
PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}", order=Order.PREFIX)


def executed(store: Store, job_id: str, count: int) -> list[int]:
    """The rows of the input in the order in which they run."""
    file = RequestFile(layout.requests_file(store.home, job_id))
    rows = file.read(range(count))
    file.close()
    return [row.row_index for row in rows]


def answer(task: Task, question: str) -> str:
    """Answer of the fake to this question and to no other."""
    return " ".join(WORDS[token] for token in answer_tokens(request_text(task.body(question)), 8))


def test_rows_that_begin_alike_run_together_and_failed_ones_last(
    store: Store, write_input: WriteInput
) -> None:
    done = submit(store, str(write_input(q=QUESTIONS)), PROMPT)
    assert executed(store, done.job_id, 8) == [4, 1, 7, 5, 3, 0, 2, 6]
    assert done.unrendered == 2
    assert done.first_error is not None


def test_a_shuffle_is_the_same_for_the_same_seed(store: Store, write_input: WriteInput) -> None:
    path = str(write_input(q=[*map(str, range(50)), None]))

    def rows(seed: int) -> list[int]:
        task = replace(PROMPT, order=Order.RANDOM, order_seed=seed)
        return executed(store, submit(store, path, task).job_id, 51)

    assert rows(1) == rows(1) != rows(2)
    assert sorted(rows(1)) == list(range(51))
    assert rows(1)[-1] == 50


def test_chats_are_ordered_by_what_they_say(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    said = ["b", "a", "b", "a"]
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"temperature": number / 2, "messages": [{"role": "user", "content": text}]},
        }
        for number, text in enumerate(said)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    done = submit(store, str(path), Task(kind=Kind.OPENAI, order=Order.PREFIX))
    assert executed(store, done.job_id, 4) == [1, 3, 0, 2]


def test_nothing_but_the_job_is_left_in_its_folder(store: Store, write_input: WriteInput) -> None:
    done = submit(store, str(write_input(q=QUESTIONS)), PROMPT)
    folder = layout.job_folder(store.home, done.job_id)
    assert sorted(path.name for path in folder.iterdir()) == [layout.INPUTS, "job.json", layout.REQUESTS]


@pytest.mark.parametrize("order", list(Order))
def test_results_come_in_the_order_of_the_input(store: Store, write_input: WriteInput, order: Order) -> None:
    """Both from the journal and from shards, of which failed rows have their own."""
    path = write_input(q=QUESTIONS, n=[str(n) for n in range(8)])
    task = replace(PROMPT, order=order, id_column="n")
    job_id = submit(store, str(path), task).job_id
    asyncio.run(Harvester(store, FakeEndpoint()).run(asyncio.Event()))
    for options in (["--with-inputs"], ["--format", "openai"]):
        lines = [json.loads(line) for line in conserve("results", job_id, *options).stdout.splitlines()]
        assert [line["custom_id"] for line in lines] == [str(n) for n in range(8)]
        if options == ["--with-inputs"]:
            assert [line["q"] for line in lines] == QUESTIONS
            assert [line["row_index"] for line in lines] == list(range(8))
    table = conserve("results", job_id, "--format", "csv").stdout.splitlines()
    assert [line.split(",")[1] for line in table[1:]] == [str(n) for n in range(8)]
    with views(store, now=0.0) as opened:
        joined = opened.duck.execute(
            "select i.q, r.text, r.error_type from results r join inputs i using (job_id, row_index) "
            "order by row_index"
        ).fetchall()
    assert [question for question, _, _ in joined] == QUESTIONS
    for question, text, error in joined:
        assert text == (answer(task, question) if error is None else None)
    assert {row[2] for row in joined if row[0] is None} == {"template"}


def test_a_retry_puts_the_right_rows_back(store: Store, write_input: WriteInput) -> None:
    job_id = submit(store, str(write_input(q=["b", "REJECT", "a"])), PROMPT).job_id
    asyncio.run(Harvester(store, FakeEndpoint()).run(asyncio.Event()))
    assert conserve("retry", job_id).returncode == 0
    assert conserve("run", "--endpoint", "fake:?reject=NEVER").returncode == 0
    rows = [json.loads(line) for line in conserve("results", job_id).stdout.splitlines()]
    assert [(row["row_index"], row["error"], row["attempts"]) for row in rows] == [
        (0, None, 1),
        (1, None, 1),
        (2, None, 1),
    ]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("sorted", "--order takes prefix, input, random or random:SEED, not 'sorted'"),
        ("prefix:1", "--order takes prefix, input, random or random:SEED, not 'prefix:1'"),
        ("random:x", "--order random:SEED takes a whole number, as in --order random:7, not 'x'"),
    ],
)
def test_an_order_that_there_is_not_is_refused(write_input: WriteInput, wanted: str, said: str) -> None:
    refused = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", "--order", wanted)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_submit_orders_by_prefix_unless_told_otherwise(store: Store, write_input: WriteInput) -> None:
    path = str(write_input(q=["b", "a"]))
    for options, rows in (([], [1, 0]), (["--order", "input"], [0, 1])):
        done = conserve("submit", path, "--prompt", "{{ q }}", *options)
        assert executed(store, done.stdout.strip(), 2) == rows


class Cached(FakeEndpoint):
    """Finds three quarters of every prompt in its cache, and answers only so many rows."""

    def __init__(self, answers: int) -> None:
        super().__init__(Script(capacity=2))
        self.answers = answers
        self.enough = asyncio.Event()

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        self.answers -= 1
        if self.answers < 0:
            self.enough.set()
            await asyncio.Event().wait()  # until the stop
        done = await super().complete(call, on_tokens)
        return msgspec.structs.replace(done, prompt_tokens=8, cached_tokens=6)


def test_status_shows_hit_rate_order_and_the_row_that_waits_for_longest(
    store: Store, write_input: WriteInput
) -> None:
    path = str(write_input(q=["d", "b", "c", "a"]))
    job_id = submit(store, path, PROMPT).job_id
    asyncio.run(stopped_after(store, Cached(2)))
    shown = conserve("status", job_id).stdout
    assert "16 prompt (12 cached, 75.0 %)" in shown
    assert "row 0 of the input has waited for" in shown
    document = json.loads(conserve("status", job_id, "--json").stdout)
    assert document["hit_rate"] == 0.75
    assert document["row_order"] == "prefix"
    assert document["oldest_waiting"]["row_index"] == 0
    assert 0 < document["oldest_waiting"]["waited_s"] < 300
    assert "oldest_waiting" not in json.loads(conserve("status", "--json").stdout)[0]
    with views(store, now=0.0) as opened:
        cached = "select row_index, cached_tokens from results order by row_index"
        assert opened.duck.execute(cached).fetchall() == [(1, 6), (3, 6)]
        assert opened.duck.execute("select row_order from jobs").fetchall() == [("prefix",)]
    assert conserve("run", "--endpoint", "fake:").returncode == 0
    document = json.loads(conserve("status", job_id, "--json").stdout)
    assert document["oldest_waiting"] is None
    assert document["hit_rate"] < 0.75


async def stopped_after(store: Store, endpoint: Cached) -> None:
    """A harvest that is stopped once the endpoint has answered all it wants to."""
    await Harvester(store, endpoint).run(endpoint.enough)


def test_a_job_of_before_there_were_orders_ran_in_that_of_the_input() -> None:
    assert row_order('{"kind":"prompt","template":"x"}') == "input"
    assert row_order(replace(PROMPT, order=Order.RANDOM, order_seed=7).to_json()) == "random:7"


def test_more_runs_than_one_merge_reads_are_merged_in_several_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_sort, "RUN_BYTES", 1)
    monkeypatch.setattr(external_sort, "FAN_IN", 2)
    keys = ["d", "b", None, "a", "b", "c", "b"]
    with external_sort.ExternalSort(tmp_path, "key") as sorting:
        for number, key in enumerate(keys):
            sorting.write(pa.table({"key": pa.array([key], pa.string()), "n": [number]}))
        found = [n for table in sorting.rows() for n in table["n"].to_pylist()]
    assert found == [3, 1, 4, 6, 5, 0, 2]
    assert list(tmp_path.iterdir()) == []


def rendered(url: Url, **body: object) -> RenderedRow:
    return RenderedRow(json.dumps(body), url=url)


@pytest.mark.parametrize(
    ("url", "name", "inputs"),
    [
        (Url.EMBEDDINGS, "input", ["a b", "a c", "b"]),
        (Url.EMBEDDINGS, "input", [[1, 2, 9], [1, 10], [300], [2**40, 1]]),
        (Url.COMPLETIONS, "prompt", [[1, 2, 9], [1, 10], [300]]),
        (Url.COMPLETIONS, "prompt", [["a", "z"], "b", ["c", 1]]),
        (Url.RESPONSES, "input", [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]),
    ],
)
def test_lines_of_each_route_are_ordered_by_what_they_say(url: Url, name: str, inputs: list[object]) -> None:
    task = Task(kind=Kind.OPENAI, order=Order.PREFIX)
    keys = [prompt_key(task, rendered(url, temperature=n, **{name: one})) for n, one in enumerate(inputs)]
    assert keys == sorted(set(keys), key=str)


def test_numbers_beside_text_are_no_token_ids() -> None:
    assert token_text([1, "x"]) is None
    assert token_text(["x"]) is None
    assert token_text([]) == ""


def test_a_merge_holds_few_rows_where_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by the bytes of their texts; a null has none."""
    monkeypatch.setattr(external_sort, "BATCH_BYTES", 2_000)
    texts = [*["x" * 1_500] * 3, *[None] * 62]
    table = pa.table({"key": pa.array(texts, pa.string()), "n": range(len(texts))})
    assert [part.num_rows for part in external_sort.small(table)] == [1, 1, 7, 31, 25]


def test_a_job_has_priority_0_unless_told_otherwise(store: Store, write_input: WriteInput) -> None:
    for named, priority in (({}, 0), ({"priority": -3}, -3)):
        job_id = submit(store, str(write_input(q=["a"])), PROMPT, **named).job_id
        with store.read() as tx:
            assert catalog.get(tx, job_id).priority == priority


def test_an_id_that_cannot_be_read_is_named_by_its_row(
    store: Store, write_input: WriteInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind the rows that are read at first."""
    monkeypatch.setattr(parquet_rows, "ROWS_PER_GROUP", 2)
    ids = pa.array([1, 2, 3, 2**61], pa.timestamp("us"))
    path = write_input(q=["a", "b", "c", "d"], id=ids)
    with pytest.raises(InputError, match="the id of row 3 is a timestamp"):
        submit(store, str(path), replace(PROMPT, id_column="id"))


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("Tuna Mutant", "tuna-mutant"),
        ("--a__b--", "a-b"),
        ("x" * 23 + " abc", "x" * 23),
        ("x" * 30, "x" * 24),
        ("\u00e9\u00e8", "job"),
    ],
)
def test_a_job_is_named_by_letters_digits_and_dashes(label: str, name: str) -> None:
    assert slug(label) == name


@pytest.mark.parametrize("rest", [[], [3, 0]])
def test_rows_behind_the_last_run_are_merged_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: list[int]
) -> None:
    tables = [pa.table({"key": keys}, schema=pa.schema([("key", pa.int64())])) for keys in ([4, 2, 1], rest)]
    monkeypatch.setattr(external_sort, "RUN_BYTES", tables[0].nbytes)
    with external_sort.ExternalSort(tmp_path, "key") as sorting:
        for table in tables:
            sorting.write(table)
        assert pa.concat_tables(sorting.rows())["key"].to_pylist() == sorted([4, 2, 1, *rest])

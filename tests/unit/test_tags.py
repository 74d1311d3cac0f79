"""Tags and names of jobs, and what a run says of jobs that it leaves as they are."""

import json

import pytest

from conserve.config import Settings
from conserve.errors import UsageError
from conserve.jobs.task import Kind, Task
from conserve.store.books import catalog
from conserve.store.books.readings import read_jobs
from conserve.store.books.states import FailedBy
from conserve.store.database.store import Store
from tests.commands import Done, conserve, ended, until
from tests.conftest import StartForked, WriteInput
from tests.submitting import submit

PROMPT = Task(kind=Kind.PROMPT, template="{{ q }}")


def queue_up(write_input: WriteInput, *flags: str, rows: int = 2) -> str:
    path = write_input(f"{rows}.parquet", q=[f"question {n}" for n in range(rows)])
    done = conserve("submit", str(path), "--prompt", "{{ q }}", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run(*arguments: str) -> Done:
    return conserve("run", "--endpoint", "fake:", *arguments)


def test_tags_are_shown_filtered_and_queried(write_input: WriteInput) -> None:
    tagged = queue_up(write_input, "--tag", "team=search", "--tag", "ticket=a=b c", "--tag", "empty=")
    other = queue_up(write_input, "--tag", "team=ads")
    plain = queue_up(write_input)
    table = conserve("jobs").stdout.splitlines()
    assert table[0].split()[-1] == "TAGS"
    assert [line.split()[0] for line in table[1:]] == [plain, other, tagged]
    assert table[3].endswith("empty= team=search ticket=a=b c")
    documents = {job["id"]: job["tags"] for job in json.loads(conserve("jobs", "--json").stdout)}
    assert documents == {
        tagged: {"team": "search", "ticket": "a=b c", "empty": ""},
        other: {"team": "ads"},
        plain: {},
    }
    for wanted, found in (
        (["team=search"], [tagged]),
        (["team"], [other, tagged]),
        (["team", "ticket=a=b c"], [tagged]),
        (["team=search", "team=ads"], []),
        (["empty="], [tagged]),
        (["nope"], []),
    ):
        flags = [word for tag in wanted for word in ("--tag", tag)]
        assert [job["id"] for job in json.loads(conserve("jobs", "--json", *flags).stdout)] == found
    assert "none of 3 jobs has the tag nope" in conserve("jobs", "--tag", "nope").stderr
    assert "tags        empty= team=search ticket=a=b c" in conserve("status", tagged).stdout
    told = conserve(
        "sql", "--json", "select id, tags['team'] as team from jobs where tags['team'] = 'search'"
    )
    assert json.loads(told.stdout) == {"id": tagged, "team": "search"}
    told = conserve("sql", "--json", "select tags from jobs where tags['team'] = 'search'")
    assert json.loads(told.stdout)["tags"] == {"empty": "", "team": "search", "ticket": "a=b c"}


def test_without_tags_the_table_has_no_column_for_them(write_input: WriteInput) -> None:
    queue_up(write_input)
    assert "TAGS" not in conserve("jobs").stdout


@pytest.mark.parametrize(
    "flags",
    [
        ["--tag", "team"],
        ["--tag", "=x"],
        ["--tag", "a=1", "--tag", "a=2"],
        ["--tag", "a=x\ny"],
        ["--tag", "a\0=x"],
    ],
)
def test_tags_that_are_none_are_refused(write_input: WriteInput, flags: list[str]) -> None:
    done = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--tag" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_tags_are_kept_with_the_job(store: Store, write_input: WriteInput) -> None:
    job_id = submit(store, str(write_input(q=["a"])), PROMPT, tags={"größe": "zwölf"}).job_id
    with store.read() as tx:
        assert catalog.get(tx, job_id).tags == {"größe": "zwölf"}
    with pytest.raises(UsageError, match="a tag is KEY=VALUE"):
        submit(store, str(write_input(q=["a"])), PROMPT, tags={"a=b": "c"})


def test_a_name_that_is_taken_says_so(write_input: WriteInput) -> None:
    first = queue_up(write_input, "--name", "Nightly")
    assert first.startswith("nightly-")
    path = str(write_input(q=["a"]))
    done = conserve("submit", path, "--prompt", "{{ q }}", "--name", "nightly")
    assert f"1 job before it had the name nightly, {first} last" in done.stderr
    assert f"this one goes by its whole id: {done.stdout.strip()}" in done.stderr
    again = conserve("submit", path, "--prompt", "{{ q }}", "--name", "nightly")
    assert f"2 jobs before it had the name nightly, {done.stdout.strip()} last" in again.stderr
    for name in ("nightly-two", "night"):
        assert "before it" not in conserve("submit", path, "--prompt", "{{ q }}", "--name", name).stderr
    assert "before it" not in conserve("submit", path, "--prompt", "{{ q }}").stderr


@pytest.mark.parametrize("name", ["日本", "...", " "])
def test_a_name_without_a_letter_is_refused(write_input: WriteInput, name: str) -> None:
    done = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", "--name", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--name takes Latin letters" in done.stderr


@pytest.mark.parametrize(
    ("name", "kept"),
    [("日本語-eval", "eval"), ("Überblick", "berblick"), ("my name", "my-name"), ("a" * 30, "a" * 24)],
)
def test_a_name_that_an_id_cannot_have_is_told_as_it_is_kept(
    write_input: WriteInput, name: str, kept: str
) -> None:
    done = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", "--name", name)
    assert done.stdout.startswith(f"{kept}-")
    assert f"the job is called {kept}, not {name}: names are of the letters a to z" in done.stderr
    for same in ("Nightly", "nightly-2"):
        told = conserve("submit", str(write_input(q=["a"])), "--prompt", "{{ q }}", "--name", same).stderr
        assert "is called" not in told


# Jobs that a run leaves as they are.


def test_a_run_on_a_paused_job_says_so_and_exits_4(write_input: WriteInput, settings: Settings) -> None:
    job_id = queue_up(write_input)
    conserve("pause", job_id)
    for command in (("run",), ("harvest", "--until-empty")):
        done = conserve(*command, job_id, "--endpoint", "fake:")
        assert (done.returncode, done.stdout) == (4, "")
        (said,) = done.stderr.splitlines()
        assert (
            said
            == f"job {job_id} is paused and 2 rows of it wait; let it go on with: conserve resume {job_id}"
        )
    assert read_jobs(settings, now=0.0)[0].done == 0


def test_a_paused_job_of_one_row_is_told_of_in_the_singular(write_input: WriteInput) -> None:
    job_id = queue_up(write_input, rows=1)
    conserve("pause", job_id)
    assert f"job {job_id} is paused and 1 row of it waits;" in conserve("run", job_id).stderr


def test_a_run_of_the_queue_mentions_what_is_paused(write_input: WriteInput) -> None:
    first, second = queue_up(write_input), queue_up(write_input)
    conserve("pause", first)
    assert run().returncode == 0, "it was not asked for the paused one"
    done = run()
    assert (done.returncode, done.stderr.strip()) == (
        0,
        f"nothing to run; {first} is paused: conserve resume {first}",
    )
    conserve("pause", queue_up(write_input))
    assert f"nothing to run; {first} and 1 other job are paused" in run().stderr
    assert second


def test_a_run_with_nothing_to_do_prints_its_outcome_too(write_input: WriteInput) -> None:
    job_id = queue_up(write_input)
    done = json.loads(run("--json").stdout)
    nothing = json.loads(run("--json").stdout)
    assert nothing == dict.fromkeys(done, 0) | {
        "interrupted": False,
        "ready": True,
        "jobs": {},
        "refused": {},
    }
    assert json.loads(run(job_id, "--json").stdout)["jobs"] == {job_id: "completed"}
    assert json.loads(run("--dry-run", "--json").stdout) == {"jobs": {}}


def test_a_paused_job_among_those_named_counts(write_input: WriteInput) -> None:
    paused, ours = queue_up(write_input), queue_up(write_input)
    conserve("pause", paused)
    done = run(ours, paused)
    assert done.returncode == 4
    assert f"{ours}: completed" in done.stderr
    assert f"job {paused} is paused" in done.stderr


def test_a_job_paused_while_it_runs_exits_4(
    write_input: WriteInput, settings: Settings, forked: StartForked
) -> None:
    job_id = queue_up(write_input, rows=4)
    running = forked("run", job_id, "--endpoint", "fake:?token_ms=50&tokens=10000")
    until(lambda: read_jobs(settings, now=0.0)[0].running > 0, running)
    conserve("pause", job_id)
    done = ended(running)
    assert done.returncode == 4
    assert f"job {job_id} is paused and 4 rows of it wait" in done.stderr


@pytest.mark.parametrize(
    ("verb", "code", "words"), [("cancel", 3, "was cancelled"), (None, 0, "is completed")]
)
def test_a_run_on_a_job_that_is_over_says_how_it_ended(
    write_input: WriteInput, verb: str | None, code: int, words: str
) -> None:
    job_id = queue_up(write_input)
    assert (conserve(verb, job_id) if verb else run()).returncode == 0
    done = run(job_id)
    assert (done.returncode, done.stdout) == (code, "")
    assert f"job {job_id} {words}" in done.stderr


def test_a_run_on_a_refused_job_says_why(store: Store, write_input: WriteInput) -> None:
    job_id = queue_up(write_input)
    with store.write() as tx:
        catalog.refuse(tx, job_id, "its input changed", FailedBy.INPUT, now=0.0)
    done = run(job_id)
    assert done.returncode == 1
    assert (
        f"job {job_id} was refused (its input changed); try again with: conserve resume {job_id}"
        in done.stderr
    )

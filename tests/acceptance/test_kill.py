"""No crash loses or repeats a row: the real command, killed at random moments, and started again."""

from pathlib import Path

import pytest

from tests.acceptance.kill_harness import Harness
from tests.acceptance.scripted_server import Script, ScriptedServer


def test_long_rows_survive_kills_and_continue_from_their_tokens(tmp_path: Path) -> None:
    prompts = [f"question {n}" + (" REJECT" if n % 50 == 7 else "") for n in range(1500)]
    harness = Harness(tmp_path / "home", prompts, script="token_ms=10&tokens=200&capacity=64", seed=1)
    harness.submit()
    harness.storm(15, longest_s=1.6)
    assert harness.finish() == 5
    harness.check()
    assert harness.kills >= 15
    assert harness.reading().resumed_tokens > 0, "some kill must have hit a row in mid-generation"


def test_many_short_rows_survive_kills_in_commit_and_compaction(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "home", [f"q{n}" for n in range(150_000)], script="tokens=4", seed=2)
    harness.submit()
    harness.storm(10, longest_s=1.4)
    assert harness.finish() == 0
    harness.check()
    assert harness.kills >= 10


def test_rows_of_several_jobs_that_share_prefixes_survive_kills(tmp_path: Path) -> None:
    subjects = [f"{subject} " * 20 for subject in ("algebra", "anatomy", "law", "logic")]
    jobs = [
        Harness(
            tmp_path / "home",
            [f"{subjects[(n * (job + 1)) % 4]}{job}.{n}" for n in range(20_000)],
            script="token_ms=1&tokens=8&capacity=256",
            seed=job,
        )
        for job in range(3)
    ]
    for job in jobs:
        job.submit()
    jobs[0].storm(8, longest_s=2.0)
    assert jobs[0].finish() == 0
    for job in jobs:
        job.check()
    assert jobs[0].kills >= 8


def test_a_killed_harvest_leaves_its_tokens_to_the_next(tmp_path: Path) -> None:
    with ScriptedServer(Script(tokens=150, token_s=0.01, max_num_seqs=16)) as server:
        prompts = [f"question {n}" for n in range(320)]  # half a minute's work, more than three kills allow
        harness = Harness(tmp_path / "home", prompts, script="tokens=150", server=server.url, seed=3)
        harness.submit()
        harness.storm(3, longest_s=3.0)
        assert harness.finish() == 0
        harness.check()
    assert harness.kills >= 3
    assert server.continued, "some kill must have hit a row in mid-generation"
    assert harness.reading().resumed_tokens > 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills(tmp_path: Path) -> None:
    kills = round_number = 0
    while kills < 1000:
        long = round_number % 2 == 0
        folder = tmp_path / f"round-{round_number}"
        folder.mkdir()
        harness = Harness(
            folder / "home",
            [f"question {n}" for n in range(2_000 if long else 100_000)],
            script="token_ms=10&tokens=200&capacity=64" if long else "tokens=4",
            seed=round_number,
        )
        harness.submit()
        harness.storm(1000 - kills, longest_s=2.0)
        assert harness.finish() == 0
        harness.check()
        kills, round_number = kills + harness.kills, round_number + 1

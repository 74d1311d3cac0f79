"""A storm of faults over PostgreSQL, a bucket and three servers: every row ends up there exactly once."""

import json
import os
import time
from pathlib import Path

import pytest

from tests import postgres
from tests.acceptance.forks import Forks
from tests.commands import REPOSITORY

pytest.importorskip("moto.server")
pytest.importorskip("fsspec")

FAULTS = int(os.environ.get("STORM_FAULTS", 1_000))
APART_S = float(os.environ.get("STORM_APART_S", 3.0))  # between two faults, in the middle
KINDS = 15
SEED = int(os.environ.get("STORM_SEED", 2026))


@pytest.mark.skipif(postgres.missing() is not None, reason=str(postgres.missing()))
@pytest.mark.parametrize(
    ("faults", "apart_s"),
    [
        pytest.param(60, 0.5, marks=pytest.mark.full),
        pytest.param(FAULTS, APART_S, marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(4 * 3600)
def test_every_row_is_there_once_after_a_storm(
    faults: int, apart_s: float, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.acceptance.storm import KEYS, storm

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    begun = time.monotonic()
    with storm(tmp_path, forks, seed=SEED) as raging:
        while raging.faults.total() < faults:
            raging.keep_busy()
            raging.rest(raging.dice.uniform(0, 2 * apart_s))
            raging.strike()
        raging.finish()
        rows = raging.check()
    found = {
        "seed": SEED,
        "faults": dict(raging.faults.most_common()),
        "jobs": len(raging.jobs),
        "rows": rows,
        "seconds": time.monotonic() - begun,
        "continued": raging.continued + sum(len(server.continued) for server in raging.servers),
        "bucket_faults": raging.proxy.faults,
        "started_anew": raging.started_anew,
    }
    kept = REPOSITORY / ".bench"
    kept.mkdir(exist_ok=True)
    (kept / f"storm-{faults}-{SEED}.json").write_text(json.dumps(found, indent=2))
    print(json.dumps(found, indent=2))
    assert found["continued"], "rows go on from their tokens"
    assert faults < 500 or len(raging.faults) == KINDS, "each kind struck"

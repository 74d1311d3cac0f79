"""Deliveries: two processes at one store, and files that cannot be read at one moment."""

from pathlib import Path

import pytest

from conserve.errors import StoreError
from conserve.jobs.batches import delivery
from conserve.jobs.batches.delivery import deliver
from conserve.store.books import batches, uploads
from conserve.store.books.batches import Batch, BatchState
from conserve.store.database.store import Store
from conserve.store.files import home
from tests.batch_rig import compute, lines
from tests.commands import conserve


@pytest.fixture
def ended(store: Store, tmp_path: Path) -> Batch:
    """A batch whose job has ended, without its files."""
    (tmp_path / "rows.jsonl").write_bytes(lines(["one", "two"]))
    assert conserve("submit", str(tmp_path / "rows.jsonl")).returncode == 0
    compute(store)
    return only_batch(store)


def only_batch(store: Store) -> Batch:
    with store.read() as tx:
        (found,) = batches.page(tx, "default", before=None, limit=2)
    return found


def delivered(store: Store, batch: Batch) -> list[str]:
    assert batch.job is not None
    return [path.stem for path in (home.job_folder(store.home, batch.job.id) / uploads.DELIVERIES).iterdir()]


def test_the_second_of_two_deliveries_leaves_the_files_of_the_first(store: Store, ended: Batch) -> None:
    deliver(store, ended.id, now=1.0)
    with store.write() as tx:
        assert not batches.deliver(tx, ended, output="file-other", errors=None, now=2.0)
    found = only_batch(store)
    assert delivered(store, found) == [found.output_file_id]


def test_a_delivery_that_waited_for_another_writes_nothing(
    store: Store, ended: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = delivery.alone

    def after_another(path: Path) -> object:
        monkeypatch.setattr(delivery, "alone", alone)
        deliver(store, ended.id, now=1.0)
        return alone(path)

    monkeypatch.setattr(delivery, "alone", after_another)
    deliver(store, ended.id, now=2.0)
    found = only_batch(store)
    assert found.delivered_at == 1.0
    assert delivered(store, found) == [found.output_file_id]


def test_answers_that_cannot_be_read_just_now_are_delivered_whole_later(store: Store, ended: Batch) -> None:
    assert ended.job is not None
    folder = home.job_folder(store.home, ended.job.id)
    (shard,) = (folder / home.RESULTS).glob("*.parquet")
    shard.rename(folder / "away")
    with pytest.raises(StoreError, match="are not written"):
        deliver(store, ended.id, now=1.0)
    assert only_batch(store).state is BatchState.FINALIZING
    assert delivered(store, ended) == []
    (folder / "away").rename(shard)
    deliver(store, ended.id, now=2.0)
    found = only_batch(store)
    assert found.state is BatchState.COMPLETED
    assert delivered(store, found) == [found.output_file_id]

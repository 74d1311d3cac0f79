"""Files of the Batch API in the store: which of them a project has, until when, and what is left on disk."""

import os
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from conserve.config import Settings, load
from conserve.store.books import uploads
from conserve.store.books.uploads import File, NewFile
from conserve.store.database.store import Store
from conserve.store.files import bucket_place, trash
from tests.played_bucket import play_with_folders
from tests.store_rows import add_job

DAY_S = 86_400.0


def new(**named: Any) -> NewFile:
    values = {"purpose": "batch", "filename": "a.jsonl", "bytes": 3, "num_lines": 2, "digest": "d"}
    return NewFile(**{**values, "path": "uploads/a.jsonl", **named})


def add(store: Store, file_id: str, project: str = "ann", **named: Any) -> None:
    with store.write() as tx:
        uploads.add(tx, project, file_id, new(**{"path": file_id, **named}), now=1.0)


def get(store: Store, file_id: str, project: str = "ann", now: float = 2.0) -> File | None:
    with store.read() as tx:
        return uploads.get(tx, project, file_id, now=now)


def page(store: Store, **named: Any) -> list[str]:
    with store.read() as tx:
        return [found.id for found in uploads.page(tx, "ann", **{"now": 2.0, "limit": 9, **named})]


def test_a_file_is_kept_as_it_was_described_for_its_project_alone(store: Store) -> None:
    described = new(expires_at=9.0, idempotency_key="k", num_lines=7)
    with store.write() as tx:
        uploads.add(tx, "ann", "file-1", described, now=1.5)
    found = get(store, "file-1")
    assert found is not None
    given = {"seq": found.seq, "id": "file-1", "project": "ann", "created_at": 1.5}
    assert asdict(found) == given | asdict(described)
    assert get(store, "file-1", "ben") is get(store, "file-2") is None


def test_files_have_ids_that_cannot_be_guessed() -> None:
    made = {uploads.new_file_id() for _ in range(9)}
    assert {(found[:5], len(found)) for found in made} == {("file-", 37)}
    assert len(made) == 9


@pytest.mark.parametrize(("now", "current"), [(8.9, True), (9.0, False)])
def test_a_file_is_there_until_it_expires(store: Store, now: float, current: bool) -> None:
    add(store, "file-1", expires_at=9.0, idempotency_key="k")
    with store.write() as tx:
        by_key = uploads.of_idempotency_key(tx, "ann", "k", now=now)
        uploads.free_idempotency_key(tx, "ann", "k", now=now)
    assert (by_key is not None) is current
    assert (get(store, "file-1", now=now) is not None) is current
    assert page(store, now=now) == (["file-1"] if current else [])
    found = get(store, "file-1", now=0.0)
    assert found is not None
    assert found.idempotency_key == ("k" if current else None)


def test_a_key_is_freed_of_its_own_project_alone(store: Store) -> None:
    for number, (project, key) in enumerate([("ann", "k"), ("ben", "k"), ("ann", "l")]):
        add(store, f"file-{number}", project, idempotency_key=key, expires_at=2.0)
    with store.write() as tx:
        uploads.free_idempotency_key(tx, "ann", "k", now=3.0)
        for project, key, there in (
            ("ann", "k", False),
            ("ben", "k", True),
            ("ann", "l", True),
            ("ben", "l", False),
        ):
            assert (uploads.of_idempotency_key(tx, project, key, now=1.0) is not None) is there


def test_files_of_a_project_are_listed_by_pages_in_one_order(store: Store) -> None:
    for number in range(5):
        purpose = "batch_output" if number % 2 else "batch"
        add(store, f"file-{number}", purpose=purpose)
    add(store, "theirs", "ben")
    assert page(store) == ["file-4", "file-3", "file-2", "file-1", "file-0"]
    assert page(store, limit=2) == ["file-4", "file-3"]
    assert page(store, limit=2, oldest_first=True) == ["file-0", "file-1"]
    middle = get(store, "file-2")
    assert middle is not None
    assert page(store, beyond=middle.seq) == ["file-1", "file-0"]
    assert page(store, beyond=middle.seq, oldest_first=True) == ["file-3", "file-4"]
    assert page(store, purpose="batch_output") == ["file-3", "file-1"]


def test_files_whose_time_is_over_are_removed_and_no_others(store: Store) -> None:
    folder = uploads.make_folder(store)
    for name, expires_at in {"over": 5.0, "gone": 4.0, "later": 5.1, "never": None}.items():
        add(store, name, expires_at=expires_at, path=f"uploads/{store.id}/{name}.jsonl")
        if name != "gone":
            (folder / f"{name}.jsonl").write_bytes(b"a")
    assert uploads.remove_expired(store, now=5.0) == 2
    assert uploads.remove_expired(store, now=5.0) == 0
    assert sorted(path.name for path in Path(str(folder)).iterdir()) == ["later.jsonl", "never.jsonl"]
    assert page(store, now=0.0) == ["never", "later"]


def test_files_of_an_earlier_delivery_are_forgotten_with_their_paths_named(store: Store) -> None:
    for job_id in ("job-1", "job-2"):
        add_job(store, job_id)
    for name, of_job in {"a": "job-1", "b": "job-1", "c": "job-2", "d": None}.items():
        add(store, name, job_id=of_job)
    with store.write() as tx:
        assert sorted(uploads.forget_deliveries(tx, "job-1")) == ["a", "b"]
        assert uploads.forget_deliveries(tx, "job-1") == []
    assert page(store) == ["d", "c"]


def test_the_sweep_leaves_named_and_young_uploads_alone(store: Store) -> None:
    folder = Path(str(uploads.make_folder(store)))
    for name, changed_at in {"named": 0.0, "old": 999.0, "young": 1000.0}.items():
        (folder / name).write_bytes(b"a")
        os.utime(folder / name, (changed_at, changed_at))
    add(store, "file-1", path=f"uploads/{store.id}/named")
    assert uploads.sweep_uploads(store, now=1000.0 + DAY_S) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["named", "young"]
    (thrown,) = trash.contents(store.home)
    assert trash.thrown_at(thrown) == 1000.0 + DAY_S


def test_uploads_in_a_bucket_are_swept_by_its_clock(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is days ahead of it throws away no upload that is about to be named."""
    (tmp_path / "service" / "team").mkdir(parents=True)
    play_with_folders(tmp_path / "service", monkeypatch)
    place = {"home": settings.home, "store": settings.store, "data": "s3://team"}
    with closing(Store.open(load(place, environ={}))) as store:
        (uploads.folder(store) / "new").write_bytes(b"a")
        days_ahead = time.time() + 2 * DAY_S
        monkeypatch.setattr(bucket_place, "time", SimpleNamespace(time=lambda: days_ahead))
        assert uploads.sweep_uploads(store, now=days_ahead) == 0
        assert uploads.sweep_uploads(store, now=days_ahead + 2 * DAY_S) == 1


def test_one_upload_that_cannot_be_swept_keeps_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(str(uploads.make_folder(store)))
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(b"a")
        os.utime(folder / name, (0, 0))
    throw_away = trash.throw_away

    def refuse_one(data: Path, path: Path, *, now: float) -> Path:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return throw_away(data, path, now=now)

    monkeypatch.setattr(trash, "throw_away", refuse_one)
    assert uploads.sweep_uploads(store, now=2 * DAY_S) == 2
    assert [path.name for path in folder.iterdir()] == ["b"]


def test_two_stores_over_one_home_have_folders_of_their_own(store: Store) -> None:
    assert uploads.folder(store) == store.home / "uploads" / store.id
    assert uploads.sweep_uploads(store, now=DAY_S) == 0, "there is no folder yet"
    with store.read() as tx:
        assert tx.scalar(text("select count(*) from file")) == 0

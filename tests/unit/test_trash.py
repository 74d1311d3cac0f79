"""The trash: what is thrown away can be found by its path for a week."""

from pathlib import Path

from conserve.store.files import trash
from conserve.store.files.place import place_of


def test_what_is_thrown_away_keeps_its_path_and_is_deleted_after_a_week(tmp_path: Path) -> None:
    data, week_s = tmp_path / "data", 7 * 86_400.0
    (data / "jobs" / "a" / "results").mkdir(parents=True)
    (data / "jobs" / "a" / "results" / "1").write_bytes(b"12345")
    (data / "jobs" / "a" / "link").symlink_to("nowhere")
    (data / "b").write_bytes(b"123")
    assert trash.contents(data) == list(trash.found(data, "b")) == []
    folder = trash.throw_away(data, data / "jobs" / "a", now=1000.9)
    file = trash.throw_away(data, data / "b", now=2000.0)
    early = trash.throw_away(data, file, now=-5.0)
    assert [trash.thrown_at(path) for path in trash.contents(data)] == [0.0, 1000.0, 2000.0]
    assert folder == trash.contents(data)[1] / "jobs" / "a"
    assert (early.read_bytes(), (folder / "results" / "1").read_bytes()) == (b"123", b"12345")
    assert [place_of(path).size() for path in (folder, early)] == [5 + len("nowhere"), 3]
    assert (place_of(folder).length(), place_of(data / "gone").length()) == (0, 0)
    (trash.folder(data) / "notes").write_bytes(b"a user's own")
    assert trash.empty(data, now=1000.0 + week_s - 1.0) == 3
    assert trash.empty(data, now=1000.0 + week_s) == 5 + len("nowhere")
    assert trash.empty(data, now=2000.0, older_than_s=0.0) == 0
    assert [path.name for path in trash.folder(data).iterdir()] == ["notes"]


def test_what_was_thrown_away_is_found_by_its_path_the_newest_first(tmp_path: Path) -> None:
    thrown = []
    for now in (1000.0, 3000.0, 2000.0):
        (tmp_path / "a").symlink_to("nowhere")
        thrown.append(trash.throw_away(tmp_path, tmp_path / "a", now=now))
    (tmp_path / "b").write_bytes(b"")
    trash.throw_away(tmp_path, tmp_path / "b", now=4000.0)
    assert list(trash.found(tmp_path, "a")) == [thrown[1], thrown[2], thrown[0]]


def test_an_entry_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"123")
    trash.throw_away(tmp_path, tmp_path / "b", now=2000.0)
    odd = trash.folder(tmp_path) / "1000-a-file"
    odd.write_bytes(b"")
    assert trash.empty(tmp_path, now=2000.0, older_than_s=0.0) == 3
    assert list(trash.folder(tmp_path).iterdir()) == [odd]

"""Paths of objects do in a bucket what paths of files do in a folder. A folder plays the bucket's service."""

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from conserve.config import Settings
from conserve.errors import StoreError, StoreUnreachable
from conserve.jobs.task import Kind, Task
from conserve.store.database.store import Store
from conserve.store.files import digests, job_folders, layout, marks, multipart, objects, trash
from conserve.store.files.bucket import ATTEMPTS, CONNECT_S, REQUEST_S, Bucket
from conserve.store.files.digests import Seal
from conserve.store.files.marks import Mark
from conserve.store.files.objects import ListedObject, ObjectPath, RangedFile, below, object_at, source
from conserve.store.files.place import place_of, scratch_of
from conserve.store.files.probe import probe
from conserve.store.upkeep import removal
from conserve.store.upkeep import sweep as sweeping
from conserve.store.upkeep.sweep import OBJECTS_STALE_AFTER_S
from tests.conftest import WriteInput
from tests.played_bucket import DENIED, ConnectionLost, Service, ServiceError, play, play_boto3
from tests.store_rows import add_job
from tests.submitting import submit

TEAM = Bucket.parse("s3://lake/team")
DATA = ObjectPath(TEAM)
WEEK_S = 7 * 86_400.0


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    return play(tmp_path / "service", monkeypatch)


def put(*keys: str, content: bytes = b"abc") -> None:
    for key in keys:
        (DATA / key).write_bytes(content)


def submit_into(settings: Settings, rows: str, task: Task) -> str:
    """Id of a job that is submitted to the store of the settings."""
    with closing(Store.open(settings)) as store:
        return submit(store, rows, task).job_id


def keys(path: ObjectPath = DATA) -> list[str]:
    """Objects below a path, by their keys."""
    return sorted(entry.path.key for entry in path.entries())


def file(tmp_path: Path, content: bytes = b"0123456789", name: str = "file") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


class TestNames:
    def test_parts_of_a_path_are_those_of_a_posix_path(self) -> None:
        path = DATA / "jobs" / "a/b.parquet"
        assert (path.key, path.at, str(path)) == (
            "jobs/a/b.parquet",
            "lake/team/jobs/a/b.parquet",
            "s3://lake/team/jobs/a/b.parquet",
        )
        assert (path.name, path.parent) == ("b.parquet", DATA / "jobs/a")
        assert path.with_name("c") == DATA / "jobs/a/c"
        assert (DATA / "a").parent == DATA
        assert DATA / "" == DATA
        assert (DATA.at, str(DATA)) == ("lake/team", "s3://lake/team")

    def test_a_path_is_relative_to_those_above_it_alone(self) -> None:
        path = DATA / "jobs/a/b"
        assert path.relative_to(DATA / "jobs") == PurePosixPath("a/b")
        assert DATA / path.relative_to(DATA) == path
        assert below(path, DATA) == "jobs/a/b"
        assert below(Path("/home/jobs/a"), Path("/home")) == "jobs/a"
        with pytest.raises(ValueError, match="is not in the subpath"):
            path.relative_to(DATA / "other")

    @pytest.mark.parametrize(
        ("path", "found"),
        [
            ("s3:/lake/a/b.parquet", ObjectPath(Bucket.parse("s3://lake"), "a/b.parquet")),
            ("gs:/lake", ObjectPath(Bucket.parse("gs://lake"))),
            (
                "s3:/lake/a?endpoint=http:/host:9000&region=eu-1",
                ObjectPath(Bucket.parse("s3://lake?endpoint=http://host:9000&region=eu-1"), "a"),
            ),
            (
                "s3://lake/a?endpoint=https://host",
                ObjectPath(Bucket.parse("s3://lake?endpoint=https://host"), "a"),
            ),
            *[("http:/lake/a", None), ("s3", None), ("s3/a", None), ("a/s3:/lake", None)],
        ],
    )
    def test_a_path_made_of_a_url_names_its_object(self, path: str, found: ObjectPath | None) -> None:
        assert object_at(Path(path)) == found


class TestObjects:
    def test_an_object_is_there_once_it_was_put_and_until_it_is_deleted(self, service: Service) -> None:
        path = DATA / "jobs/a"
        assert not path.exists()
        path.write_bytes(b"first")
        path.write_bytes(b"abc")
        assert (path.exists(), path.is_file(), path.is_dir()) == (True, True, False)
        assert (path.parent.exists(), path.parent.is_file(), path.parent.is_dir()) == (True, False, True)
        assert path.read_bytes() == b"abc"
        path.unlink()
        assert not path.exists()
        path.unlink(missing_ok=True)
        for missing in (path.unlink, path.stat, path.read_bytes, path.open):
            with pytest.raises(FileNotFoundError):
                missing()

    def test_a_listing_says_what_is_there_how_large_and_since_when(self, service: Service) -> None:
        put("a/b/c", "d")
        put("a/e", content=b"12345")
        os.utime(service.root / "lake/team/a/e", (7.5, 7.5))
        assert (DATA / "a/e").stat() == objects.ObjectStat(5, 7.5)
        assert ListedObject(DATA / "a/e", 5, 7.5) in list(DATA.entries())
        assert keys() == ["a/b/c", "a/e", "d"]
        assert keys(DATA / "a/b") == ["a/b/c"]
        assert sorted(DATA.iterdir()) == [DATA / "a", DATA / "d"]
        assert [*(DATA / "none").iterdir(), *(DATA / "none").entries()] == []
        assert dict(place_of(DATA).changes()).keys() == {DATA / key for key in keys()}
        assert (DATA / "a/e", 7.5) in list(place_of(DATA).changes())

    def test_what_stands_for_a_folder_is_no_object_and_a_service_may_keep_no_times(
        self, service: Service
    ) -> None:
        put("a/b")
        for path in ("lake/team/a/", "lake/team/c"):
            service.listed_too.append(fs.FileInfo(path, fs.FileType.File, size=3))
        assert keys() == ["a/b", "c"]
        assert ListedObject(DATA / "c", 3, 0.0) in list(DATA.entries())
        assert (DATA / "c").stat() == objects.ObjectStat(3, 0.0)

    def test_a_file_goes_up_and_comes_down_in_blocks(
        self, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(objects, "BLOCK_BYTES", 4)
        (DATA / "a").upload(file(tmp_path))
        (DATA / "a").download(tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"0123456789"
        (DATA / "a").copy_to(DATA / "b")
        assert (DATA / "b").read_bytes() == b"0123456789"

    def test_a_version_is_another_after_each_write(self, service: Service, tmp_path: Path) -> None:
        versions = []
        for content in (b"old", b"new", b"newer"):
            (DATA / "a").write_bytes(content)
            versions.append((DATA / "a").download(tmp_path / "copy"))
            assert (DATA / "a").open().version() == versions[-1]
        assert [version.size for version in versions] == [3, 3, 5]
        assert len({version.tag for version in versions}) == 3
        assert versions[0].modified is None, "this service says no time"

    def test_an_upload_that_arrives_shorter_is_said(self, service: Service, tmp_path: Path) -> None:
        service.short = 1
        with pytest.raises(StoreUnreachable, match="s3://lake/team/a is not as it was sent"):
            (DATA / "a").upload(file(tmp_path))

    def test_an_object_that_users_read_is_replaced_by_a_whole_one(
        self, service: Service, tmp_path: Path
    ) -> None:
        put("out/a.parquet", content=b"old")
        service.short = 1
        with pytest.raises(StoreUnreachable):
            (DATA / "out/a.parquet").replace_by(file(tmp_path))
        assert (DATA / "out/a.parquet").read_bytes() == b"old"
        assert keys() == ["out/a.parquet"]
        service.refused = frozenset({"open_output_stream"})
        with pytest.raises(StoreUnreachable):
            (DATA / "out/a.parquet").replace_by(file(tmp_path))
        service.short, service.asked, service.refused = 0, [], frozenset()
        (DATA / "out/a.parquet").replace_by(file(tmp_path))
        assert (DATA / "out/a.parquet").read_bytes() == b"0123456789"
        assert keys() == ["out/a.parquet"]
        (partial,) = [PurePosixPath(at) for name, at in service.asked if name == "open_output_stream"]
        assert (str(partial.parent), partial.name[:11]) == ("lake/team/out", ".a.parquet."), "beside it"

    @pytest.mark.parametrize(("size", "copied"), [(10, 1), (9, 0)])
    def test_what_the_service_cannot_copy_replaces_an_object_at_once(
        self, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, copied: int
    ) -> None:
        monkeypatch.setattr(objects, "MOST_COPIED_BYTES", size)
        (DATA / "a").replace_by(file(tmp_path))
        assert (DATA / "a").read_bytes() == b"0123456789"
        assert [name for name, _ in service.asked].count("copy_file") == copied

    def test_a_tree_goes_with_all_that_is_in_it_and_nothing_beside_it(self, service: Service) -> None:
        put("a/b/c", "a/d", "ab", "e")
        (DATA / "a").remove_tree()
        assert keys() == ["ab", "e"]
        (DATA / "e").remove_tree()
        (DATA / "none").remove_tree()
        assert keys() == ["ab"]

    @pytest.mark.parametrize("request_name", ["get_file_info", "open_input_file", "open_output_stream"])
    def test_a_service_that_refuses_is_named_with_its_code_alone(
        self, service: Service, tmp_path: Path, request_name: str
    ) -> None:
        put("a")
        service.refused = frozenset({request_name})
        attempts: Mapping[str, Sequence[Callable[[], object]]] = {
            "get_file_info": [(DATA / "a").stat, (DATA / "a").remove_tree, lambda: list(DATA.iterdir())],
            "open_input_file": [(DATA / "a").read_bytes, (DATA / "a").open],
            "open_output_stream": [
                lambda: (DATA / "b").write_bytes(b""),
                lambda: (DATA / "b").upload(file(tmp_path)),
            ],
        }
        for attempt in attempts[request_name]:
            with pytest.raises(StoreUnreachable) as said:
                attempt()
            assert str(said.value).startswith(
                "s3://lake/team cannot be reached (access denied, HTTP 403); nothing"
            )
            assert "AKIAKEY" not in str(said.value)

    @pytest.mark.parametrize("request_name", ["delete_file", "delete_dir_contents", "copy_file", "read_at"])
    def test_a_service_that_allows_no_changes_is_named_too(self, service: Service, request_name: str) -> None:
        put("a/b")
        service.refused = frozenset({request_name})
        attempts: Mapping[str, Sequence[Callable[[], object]]] = {
            "delete_file": [
                (DATA / "a/b").unlink,
                lambda: (DATA / "a/b").unlink(missing_ok=True),
                (DATA / "a/b").remove_tree,
            ],
            "delete_dir_contents": [(DATA / "a").remove_tree],
            "copy_file": [lambda: (DATA / "a/b").copy_to(DATA / "c")],
            "read_at": [(DATA / "a/b").read_bytes],
        }
        for attempt in attempts[request_name]:
            with pytest.raises(StoreUnreachable):
                attempt()
        assert keys() == ["a/b"]


class Numbers(RangedFile):
    """Ten digits."""

    size = 10

    def read_at(self, start: int, size: int) -> bytes:
        assert start + size <= self.size, "bytes that do not exist"
        return b"0123456789"[start : start + size]


class TestReading:
    def test_an_object_is_read_like_a_file(self) -> None:
        file, model = Numbers(), io.BytesIO(b"0123456789")
        assert (file.readable(), file.seekable(), file.tell()) == (True, True, 0)
        for move in (
            (4,),
            (2, io.SEEK_CUR),
            (-3, io.SEEK_END),
            (-1, io.SEEK_CUR),
            (20,),
            (0, io.SEEK_END),
            (0,),
        ):
            assert file.seek(*move) == model.seek(*move) == file.tell()
            assert file.read(2) == model.read(2)
            assert file.tell() == model.tell()
        assert (file.read(0), file.read(3), file.read(None), file.read()) == (b"", b"234", b"56789", b"")
        assert file.seek(-20, io.SEEK_CUR) == 0
        assert file.read(-1) == b"0123456789"

    def test_a_buffer_is_filled_as_far_as_there_are_bytes(self) -> None:
        file, buffer = Numbers(), bytearray(6)
        assert (file.readinto(buffer), bytes(buffer)) == (6, b"012345")
        assert (file.readinto(buffer), bytes(buffer)) == (4, b"678945")
        assert file.readinto(buffer) == 0

    def test_an_answer_that_is_cut_off_is_asked_for_again_once(self, service: Service) -> None:
        put("a", content=b"0123456789")
        service.most_read = 5
        assert (DATA / "a").read_bytes() == b"0123456789"
        service.most_read = 4
        with (DATA / "a").open() as opened:
            assert (opened.read(6), opened.tell()) == (b"012345", 6)
        with pytest.raises(StoreUnreachable, match="s3://lake/team/a was cut off"):
            (DATA / "a").read_bytes()
        service.most_read, service.asked = None, []
        assert (DATA / "a").read_bytes() == b"0123456789"
        assert [name for name, _ in service.asked].count("read_at") == 1

    def test_parquet_is_read_where_it_lies(self, service: Service, tmp_path: Path) -> None:
        pq.write_table(pa.table({"q": [1, 2]}), tmp_path / "file")
        (DATA / "a").upload(tmp_path / "file")
        for path in (DATA / "a", tmp_path / "file"):
            assert pq.read_table(source(path))["q"].to_pylist() == [1, 2]


class TestDigests:
    def test_an_object_is_what_was_written_or_its_fault_is_named(
        self, service: Service, tmp_path: Path
    ) -> None:
        pq.write_table(pa.table({"q": [1]}), tmp_path / "file")
        (DATA / "a").upload(tmp_path / "file")
        seal = digests.seal(tmp_path / "file")
        assert digests.seal(DATA / "a") == seal
        assert digests.fault(DATA / "a", seal) is digests.fault(DATA / "a", None) is None
        assert digests.fault(DATA / "b", seal) == digests.fault(DATA / "b", None) == "is missing"
        put("a", content=b"x" * seal.bytes)
        assert digests.fault(DATA / "a", seal) == "is not what was written"
        assert str(digests.fault(DATA / "a", None)).startswith("is damaged (")
        put("a", content=b"x")
        assert digests.fault(DATA / "a", Seal(bytes=2, digest="d")) == "has 1 of its 2 bytes"


class TestHome:
    def test_a_finished_folder_becomes_objects_and_its_mark_is_the_first(
        self, service: Service, tmp_path: Path
    ) -> None:
        with job_folders.new(tmp_path, "store") as folder:
            (folder / "inputs").mkdir()
            (folder / "inputs" / "a.parquet").write_bytes(b"rows")
            (folder / layout.REQUESTS).write_bytes(b"requests")
            job_folders.adopt(folder, DATA, "job-1")
        assert keys() == [f"jobs/job-1/{name}" for name in ("inputs/a.parquet", marks.MARK, layout.REQUESTS)]
        put_first = next(at for name, at in service.asked if name == "open_output_stream")
        assert put_first.endswith(marks.MARK)
        assert (DATA / "jobs/job-1/inputs/a.parquet").read_bytes() == b"rows"
        assert not folder.exists()
        job_folders.discard(DATA, "job-1")
        assert keys() == []

    def test_a_job_that_cannot_be_discarded_is_left_to_the_sweep(self, service: Service) -> None:
        put("jobs/job-1/a")
        service.refused = frozenset({"delete_dir_contents"})
        job_folders.discard(DATA, "job-1")
        assert keys() == ["jobs/job-1/a"]

    def test_a_job_in_a_bucket_has_an_id_that_no_other_submit_draws(
        self, service: Service, settings: Settings, write_input: WriteInput
    ) -> None:
        """The objects of the second one would take the place of the first one's."""
        task = Task(kind=Kind.PROMPT, template="{{ q }}")
        in_folder = len(submit_into(settings, str(write_input(q=["a"])), task))
        bucket = replace(settings, home=settings.home / "other", data="s3://lake/team")
        assert len(submit_into(bucket, str(write_input(q=["a"])), task)) == in_folder + 8

    def test_a_clock_that_is_ahead_of_the_buckets_takes_no_object_early(
        self, service: Service, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A submit may be between the upload of its objects and their registration."""
        place_of(DATA / "jobs/begun").set_mark(marks.Mark(store_id=store.id))
        before = keys()
        later = time.time() + 2 * OBJECTS_STALE_AFTER_S
        with monkeypatch.context() as patch:
            patch.setattr("conserve.store.files.bucket_place.time", SimpleNamespace(time=lambda: later))
            assert sweeping.sweep_objects(store, DATA, now=later) == 0
        assert keys() == before
        assert sweeping.sweep_objects(store, DATA, now=later) == 1, "it has become old"

    def test_objects_of_other_programs_beside_the_jobs_are_no_jobs(
        self, service: Service, store: Store
    ) -> None:
        """They stay, and disturb neither the sweep nor the sizes."""
        put("jobs/_SUCCESS", "jobs/job-1", "jobs/job-2/requests.parquet")
        add_job(store, "job-1")
        add_job(store, "job-2")
        store = replace(store, data=DATA)
        assert [job.bytes for job in removal.usage(store)] == [0, 3]
        assert removal.room(store).unknown_bytes == 3
        assert sweeping.sweep_objects(store, DATA, now=time.time() + 2 * OBJECTS_STALE_AFTER_S) == 0
        assert keys(DATA / "jobs") == ["jobs/_SUCCESS", "jobs/job-1", "jobs/job-2/requests.parquet"]

    def test_a_file_is_written_on_this_machine_and_sent_whole(self, service: Service, tmp_path: Path) -> None:
        with scratch_of(DATA / "a", tmp_path) as scratch:
            assert scratch.parent == tmp_path / layout.SENDING
            scratch.write_bytes(b"abc")
            place_of(DATA / "a").write(scratch)
        with place_of(DATA / "a").fetched(tmp_path) as copy:
            assert copy.read_bytes() == b"abc"
        with pytest.raises(FileNotFoundError), place_of(DATA / "none").fetched(tmp_path):
            pass
        service.refused = frozenset({"open_input_file"})
        with pytest.raises(StoreUnreachable), place_of(DATA / "a").fetched(tmp_path):
            pass
        assert list((tmp_path / layout.SENDING).iterdir()) == []

    def test_folders_need_not_be_made_and_are_listed_by_name(self, service: Service) -> None:
        place_of(DATA / "a/b").make_with_parents()
        place_of(DATA / "c").make()
        assert service.asked == []
        put("d/2", "d/1", "d/3/x")
        assert layout.listed(DATA / "d") == [DATA / "d/1", DATA / "d/2", DATA / "d/3"]
        assert layout.listed(DATA / "none") == []

    def test_a_trial_of_the_place_leaves_nothing_there(self, service: Service, tmp_path: Path) -> None:
        assert 0.0 <= probe(DATA) < 60.0
        assert keys() == []
        for _ in range(2):
            assert 0.0 <= probe(tmp_path / "data") < 60.0
        assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []
        service.short = 1
        with pytest.raises(StoreError, match="s3://lake/team does not keep what is written there"):
            probe(DATA)

    def test_a_place_that_deletes_nothing_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Path, "unlink", lambda path: None)
        with pytest.raises(StoreError, match="or does not delete it"):
            probe(tmp_path)


class TestMarks:
    def test_a_mark_is_an_object_and_there_are_no_locks(self, service: Service) -> None:
        folder, mark = DATA / "jobs/a", Mark(store_id="ours")
        with place_of(folder).held(mark, alone=True), place_of(folder).free():
            place_of(folder).drop_bare()
        assert keys() == []
        assert place_of(folder).mark() is None
        place_of(folder).set_mark(mark)
        place_of(folder).drop_bare()
        assert (place_of(folder).mark(), keys()) == (mark, ["jobs/a/job.json"])
        job_folders.register(folder, "ours", {"id": "a"})
        registered = Mark(store_id="ours", registered=True, record={"id": "a"})
        with place_of(folder).seized("ours") as seized, place_of(folder).seized("ours") as again:
            assert seized == again == registered
        for where, owner in (folder, "theirs"), (folder, ""), (DATA / "jobs/b", "ours"):
            with place_of(where).seized(owner) as seized:
                assert seized is None
        place_of(folder).set_mark(Mark(store_id=""))
        with place_of(folder).seized("") as seized:
            assert seized is None, "the mark of a store without an id belongs to no store"
        service.refused = frozenset({"open_output_stream"})
        job_folders.register(folder, "ours", {})


class TestTrash:
    def test_objects_are_thrown_away_found_and_deleted_after_a_week(self, service: Service) -> None:
        put("jobs/a/1", "jobs/a/b/2", "jobs/c", "uploads/d", content=b"12345")
        thrown = trash.throw_away(DATA, DATA / "jobs/a", now=1000.9)
        assert thrown.key.endswith("/jobs/a")
        assert thrown.key.startswith("trash/1000-")
        assert keys(thrown) == [f"{thrown.key}/1", f"{thrown.key}/b/2"]
        later = trash.throw_away(DATA, DATA / "jobs/c", now=2000.0)
        assert later.read_bytes() == b"12345"
        assert keys(DATA / "jobs") == []
        assert not (service.root / "lake/team/jobs/a/b").exists(), "what object storage keeps of a folder"
        assert [trash.thrown_at(path) for path in trash.contents(DATA)] == [1000.0, 2000.0]
        assert list(trash.found(DATA, "jobs/c")) == [later]
        assert list(trash.found(DATA, "jobs/a/1")) == [thrown / "1"]
        assert place_of(DATA / "trash").size() == 15
        assert (place_of(later).size(), place_of(later).length(), place_of(DATA / "none").length()) == (
            5,
            5,
            0,
        )
        assert trash.empty(DATA, now=1000.0 + WEEK_S) == 10
        assert trash.empty(DATA, now=1000.0 + WEEK_S) == 0
        assert trash.empty(DATA, now=2000.0, older_than_s=0.0) == 5
        assert keys() == ["uploads/d"]

    def test_what_was_thrown_away_before_a_fault_is_in_one_place(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put("jobs/a/1", "jobs/a/2", "jobs/a/3")
        copy_file, copies = service.copy_file, []

        def fail_at_the_second(at: str, to: str) -> None:
            copies.append(at)
            if len(copies) == 2:
                raise DENIED
            copy_file(at, to)

        monkeypatch.setattr(service, "copy_file", fail_at_the_second)
        with pytest.raises(StoreUnreachable):
            trash.throw_away(DATA, DATA / "jobs/a", now=1000.0)
        assert len(keys(DATA / "jobs/a")) == 2
        assert len(keys(DATA / "trash")) == 1

    def test_an_object_that_goes_while_it_is_thrown_away_is_no_error(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put("jobs/a/1")
        copy_file = service.copy_file

        def copy_and_lose(at: str, to: str) -> None:
            copy_file(at, to)
            (service.root / at).unlink()

        monkeypatch.setattr(service, "copy_file", copy_and_lose)
        thrown = trash.throw_away(DATA, DATA / "jobs/a", now=1000.0)
        assert keys() == [f"{thrown.key}/1"]


class TestUnfinishedUploads:
    def test_those_of_this_path_that_began_before_the_time_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun_at = {"team/a/1": 10.0, "team/a/2": 20.0, "team/a/3": 5.0, "team/ab": 5.0, "a/4": 5.0}
        boto = play_boto3(begun_at, monkeypatch)
        assert multipart.can_list()
        assert multipart.abort_older(DATA / "a", before=20.0) == 2
        assert begun_at.keys() == {"team/a/2", "team/ab", "a/4"}
        assert (boto.asked["service"], boto.asked["listing"]) == ("s3", "list_multipart_uploads")
        assert boto.asked["config"] | {"s3": None} == {
            "connect_timeout": CONNECT_S,
            "read_timeout": REQUEST_S,
            "retries": {"total_max_attempts": ATTEMPTS, "mode": "standard"},
            "s3": None,
        }

    @pytest.mark.parametrize(
        ("query", "region", "address", "style"),
        [
            ("", None, None, None),
            ("?region=eu-1", "eu-1", None, None),
            ("?endpoint=http://host", "us-east-1", "http://host", {"addressing_style": "path"}),
            ("?endpoint=http://host&region=eu-1", "eu-1", "http://host", {"addressing_style": "path"}),
        ],
    )
    def test_they_are_asked_for_where_the_objects_are(
        self,
        monkeypatch: pytest.MonkeyPatch,
        query: str,
        region: str | None,
        address: str | None,
        style: dict[str, str] | None,
    ) -> None:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name, raising=False)
        boto = play_boto3({}, monkeypatch)
        assert multipart.abort_older(ObjectPath(Bucket.parse(f"s3://lake/team{query}")), before=0.0) == 0
        assert (boto.asked["region_name"], boto.asked["endpoint_url"]) == (region, address)
        assert boto.asked["config"]["s3"] == style

    def test_only_s3_keeps_them_and_only_boto3_lists_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun_at = {"team/a": 0.0}
        boto = play_boto3(begun_at, monkeypatch)
        assert multipart.abort_older(ObjectPath(Bucket.parse("gs://lake/team")), before=9.0) == 0
        monkeypatch.setattr(multipart, "find_spec", lambda name: None if name == "boto3" else boto)
        assert not multipart.can_list()
        assert multipart.abort_older(DATA, before=9.0) == 0
        assert (begun_at, boto.asked) == ({"team/a": 0.0}, {})

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (ServiceError("AccessDenied"), "AccessDenied"),
            (ServiceError(), "ServiceError"),
            (ConnectionLost(), "ConnectionLost"),
        ],
    )
    def test_a_service_that_does_not_end_them_is_named_by_its_code(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
    ) -> None:
        play_boto3({}, monkeypatch).error = error
        with pytest.raises(StoreUnreachable) as found:
            multipart.abort_older(DATA, before=0.0)
        assert str(found.value).startswith(
            f"unfinished uploads of s3://lake/team cannot be ended ({said}); see"
        )
        assert found.value.__cause__ is None

"""The folder of profiles: names of files, which profile is found, which are replaced, which cannot be read."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from conserve.errors import ProfileDamaged, ProfileMismatch, ProfileMissing
from conserve.profiles import profile as profiles
from conserve.profiles.book import Book
from conserve.profiles.conserve import ConServeModel
from conserve.profiles.profile import Profile, ProfileKey
from tests.fake_rig import KEY, measured_profile

COMMAND = "conserve profile fake-model"
OTHER = replace(KEY, device="H200")


def profile_of(name: str = "org/fake-model", key: ProfileKey = KEY, day: int = 1) -> Profile:
    return measured_profile(name, key, ConServeModel.of(*range(8)), day=day)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "profiles")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("org/Qwen2.5-7B", "Qwen2.5-7B"),
        ("one/two/my model_é", "my-model-é"),
        ("a:b", "a-b"),
        ("--.x.--", "x"),
        ("Xaz", "Xaz"),
        ("org/", "model"),
        ("", "model"),
    ],
)
def test_a_file_is_named_after_the_model_and_the_key(book: Book, name: str, begins: str) -> None:
    assert book.path(name, KEY) == book.folder / f"{begins}-{KEY.digest}.json"
    assert book.correction_path(name, KEY) == book.folder / f"{begins}-{KEY.digest}.drift"


def test_a_profile_replaces_those_with_its_key_and_what_was_learned_for_them(book: Book) -> None:
    book.save(profile_of("old"))
    kept = [book.save(profile_of(key=OTHER)), book.correction_path("x", OTHER)]
    kept.append(book.folder / f"x-{KEY.digest}.partial")
    gone = [book.correction_path(name, KEY) for name in ("old", "new")]
    for path in (*kept[1:], *gone):
        path.write_bytes(b"")
    path = book.save(profile_of("new"))
    assert {*book.folder.iterdir()} == {path, *kept}
    assert book.save(profile_of("new")) == path
    assert profiles.read(path).name == "new"


def test_of_two_files_with_one_key_the_last_written_counts(book: Book) -> None:
    for name, written in (("b", 2), ("c", 3), ("a", 1)):
        path = book.path(name, KEY)
        profiles.write(profile_of(name), path)
        os.utime(path, (written, written))
    assert book.find(KEY, command=COMMAND).name == "c"


def test_a_file_under_the_name_of_another_key_is_refused(book: Book) -> None:
    profiles.write(profile_of(key=OTHER), book.path("fake-model", KEY))
    with pytest.raises(ProfileMismatch, match="device: H200 there"):
        book.find(KEY, command=COMMAND)


def test_a_damaged_file_of_an_engine_is_measured_again_with_that_engines_command(book: Book) -> None:
    book.save(profile_of()).write_text("{")
    with pytest.raises(ProfileDamaged, match=f"measure it again with: {COMMAND}$"):
        book.find(KEY, command=COMMAND)


def test_the_nearest_profile_has_the_fewest_differences(book: Book) -> None:
    for device, engine in (("A", "vllm 1"), ("B", KEY.engine), ("C", "vllm 3")):
        book.save(profile_of(key=replace(KEY, device=device, engine=engine)))
    book.save(profile_of(key=replace(KEY, model="another")))
    with pytest.raises(ProfileMissing) as error:
        book.find(KEY, command=COMMAND)
    assert str(error.value) == (
        "no profile for this model on this machine; the nearest differs (device: B there, CPU, 2 cores here); "
        f"run: {COMMAND}"
    )


def test_profiles_are_listed_by_age_and_named_by_model_the_newest_first(book: Book) -> None:
    for day, device in ((2, "A"), (3, "B"), (1, "C")):
        book.save(profile_of(key=replace(KEY, device=device), day=day))
    other = profile_of("another", day=4)
    book.save(other)
    assert [profile.key.device for profile in book.all()] == ["C", "A", "B", KEY.device]
    assert book.named("org/fake-model").key.device == "B"
    assert book.named(KEY.digest) == book.named("another") == other


def test_a_damaged_file_is_told_to_those_who_name_it_alone(book: Book) -> None:
    good = profile_of("fine-model", OTHER)
    book.save(good)
    book.save(profile_of("org/fake-model")).write_bytes(b"{")
    assert book.all() == [good]
    for name in ("org/fake-model", "fake-model"):
        with pytest.raises(ProfileDamaged):
            book.named(name)
    with pytest.raises(
        ProfileMissing, match="there is no profile of org/fake; there are: fine-model, llama-2"
    ):
        book.named("org/fake")

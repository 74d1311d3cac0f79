"""Where no hub answers, the harnesses' libraries are told to ask none."""

import os
import sys

import httpx
import pytest

from conserve.nightly.harness.libraries import HUB, OFFLINE, absent_hub


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the user's, and no library that has read it."""
    for name in (*OFFLINE, "HF_ENDPOINT"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the code under test sets
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)


def asked(monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> list[str]:
    """Addresses that are asked, each with this answer."""
    addresses: list[str] = []

    def head(address: str, *, timeout: float) -> None:
        assert timeout < 30
        addresses.append(address)
        if answer is not None:
            raise answer

    monkeypatch.setattr(httpx, "head", head)
    return addresses


@pytest.mark.parametrize(
    "fault", [httpx.ConnectError("no"), httpx.ConnectTimeout("no"), httpx.InvalidURL("no")]
)
def test_a_hub_that_does_not_answer_is_asked_once_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    addresses = asked(monkeypatch, fault)
    assert absent_hub.__wrapped__() == HUB
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert addresses == [HUB]


def test_a_hub_that_answers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    addresses = asked(monkeypatch, None)
    assert absent_hub.__wrapped__() is None
    assert "HF_HUB_OFFLINE" not in os.environ
    assert addresses == ["https://mirror.example"]


@pytest.mark.parametrize("name", OFFLINE)
def test_a_users_own_variable_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    assert asked(monkeypatch, httpx.ConnectError("no")) == []
    assert absent_hub.__wrapped__() is None
    assert os.environ[name] == "0"


def test_a_library_that_has_read_its_variables_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", sys)
    assert asked(monkeypatch, httpx.ConnectError("no")) == []
    assert absent_hub.__wrapped__() is None

"""Processes that end with the one that started them."""

import asyncio
import os
import sys

import pytest

from conserve.engine.runtime import parent_death
from conserve.engine.service import ProcessCommand, SupervisedProcess


async def code_of_a_start() -> int:
    """Exit code of a supervised process that says by it that it began."""
    process = SupervisedProcess(ProcessCommand(name="child", words=[sys.executable, "-c", "exit(7)"]))
    await process.start()
    return await process.ended()


def test_a_child_begins_beside_its_parent() -> None:
    assert asyncio.run(code_of_a_start()) == 7


def test_a_child_whose_parent_died_before_it_could_ask_for_a_signal_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent_death.os, "getppid", lambda: 1)
    assert os.getppid() == 1
    assert asyncio.run(code_of_a_start()) == 128 + 15

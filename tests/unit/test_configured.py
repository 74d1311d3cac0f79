"""Sizes of an iteration that vLLM gives a server and offline work, where the user names none."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("cpu", "served", "context"),
    [
        (False, True, "OPENAI_API_SERVER"),
        (False, False, "LLM_CLASS"),
        (True, True, "OPENAI_API_SERVER"),
        (True, False, None),
    ],
)
def test_an_engine_is_sized_for_what_it_is_used_for(
    cpu: bool, served: bool, context: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms

    from conserve.engine.vllm.launching import flags

    asked, reserved = list[Any](), list[Any]()
    arguments = SimpleNamespace(create_engine_config=asked.append)
    monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    monkeypatch.setattr(flags, "reserve_cores", reserved.append)
    flags.configured(arguments, served=served)
    assert [one and one.name for one in asked] == [context]
    assert len(reserved) == (cpu and served), "a server on a CPU leaves cores free"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("flags", "cpu", "warns"),
    [
        (["--no-async-scheduling"], False, True),
        (["--async-scheduling", "--no_async_scheduling"], False, True),
        (["--no-async-scheduling", "--async-scheduling"], False, False),
        (["--no-async-scheduling"], True, False),
        ([], False, False),
    ],
)
def test_a_start_without_iterations_ahead_on_an_accelerator_warns_of_the_promises(
    flags: list[str], cpu: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms

    from conserve.engine.vllm.launching.flags import said_of_scheduling

    monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    assert bool(said_of_scheduling(flags)) == warns

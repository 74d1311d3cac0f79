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

    from conserve.engine.vllm.launching.flags import configured

    asked = list[Any]()
    arguments = SimpleNamespace(create_engine_config=asked.append)
    monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    configured(arguments, served=served)
    assert [one and one.name for one in asked] == [context]

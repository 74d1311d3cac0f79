"""Models that are asked of the hub before an engine starts with them."""

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from conserve.engine.vllm.launching.environment import quiet_warnings
from conserve.engine.vllm.model.hub import require_on_hub
from conserve.errors import EndpointUnusable
from tests.installed import needs

pytestmark = needs("huggingface_hub")
MODEL = "no/such-model"


def not_found() -> Exception:
    from huggingface_hub.errors import RepositoryNotFoundError

    request = httpx.Request("GET", "https://huggingface.co/api/models/no/such-model")
    answer: Any = httpx.Response(404, request=request)
    return RepositoryNotFoundError("404", response=answer)


def offline() -> Exception:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return OfflineModeIsEnabled("offline")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (not_found, "the hub has no model no/such-model, or not for this user; correct its name"),
        (lambda: httpx.ConnectError("Name or service not known"), "and the hub cannot be reached"),
        (lambda: ConnectionRefusedError(), "and the hub cannot be reached"),
        (offline, "HF_HUB_OFFLINE keeps it from the hub"),
        (lambda: httpx.ReadTimeout("slow"), None),
        (lambda: ValueError("a quantization behind the id"), None),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_before_anything_starts(
    answer: Callable[[], Exception], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []

    def model_info(hub: object, model: str, *, timeout: float) -> None:
        asked.append(model)
        raise answer()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if said is None:
        require_on_hub(MODEL)
    else:
        with pytest.raises(EndpointUnusable, match=said):
            require_on_hub(MODEL)
    (tmp_path / "models--no--such-model/snapshots/1").mkdir(parents=True)
    require_on_hub(MODEL)
    require_on_hub(str(tmp_path))
    assert asked == [MODEL], "for neither a model of the cache nor a folder"


def test_retries_of_the_hubs_client_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module sets the level while it is imported, after which it must be set."""
    module = "huggingface_hub.utils.logging"
    monkeypatch.delitem(sys.modules, module, raising=False)
    quiet_warnings()
    importlib.import_module(module)
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)

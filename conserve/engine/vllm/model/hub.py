"""Whether a model can be had from the hub, asked before vLLM is imported, which takes up to a minute."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from conserve.errors import EndpointUnusable

ANSWERS_S = 5.0
ELSEWHERE = "VLLM_USE_MODELSCOPE"  # variable of vLLM: models come from another hub
UNREACHED = ("ConnectError", "ConnectTimeout", "ConnectionError")  # httpx's, and of older clients requests'


def require_on_hub(model: str) -> None:
    """Raise `EndpointUnusable` for a model that is neither on this machine nor to be had from the hub."""
    if (
        Path(model).exists()
        or ELSEWHERE in os.environ
        or find_spec("huggingface_hub") is None
        or is_cached(model)
    ):
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    missing = f"{model} is not in the hub's cache on this machine"
    try:
        HfApi().model_info(model, timeout=ANSWERS_S)
    except OfflineModeIsEnabled as error:
        raise EndpointUnusable(f"{missing}, and HF_HUB_OFFLINE keeps it from the hub; unset it") from error
    except GatedRepoError:
        return  # vLLM says what is to be done
    except RepositoryNotFoundError as error:
        said = f"the hub has no model {model}, or not for this user; correct its name, or set HF_TOKEN"
        raise EndpointUnusable(said) from error
    except Exception as error:
        if any(kind.__name__ in UNREACHED for kind in type(error).__mro__):
            said = f"{missing}, and the hub cannot be reached; name a model folder, or correct the name"
            raise EndpointUnusable(said) from error
        # Whatever else is wrong, vLLM may get by.


def is_cached(model: str) -> bool:
    """True if the hub's cache has files of the model, of whichever revision."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    snapshots = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "snapshots"
    with suppress(OSError):
        return any(snapshots.iterdir())
    return False

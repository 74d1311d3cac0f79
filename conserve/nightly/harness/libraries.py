"""Libraries of evaluation harnesses, which ConServe does not depend on."""

import os
import sys
from functools import cache
from importlib.util import find_spec

from conserve.errors import PackageMissing
from conserve.installation import install_line

NAMES = {"lm_eval": "lm-eval", "inspect_ai": "inspect_ai"}

HUB = "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")  # variables of a user who decides
HUB_ANSWERS_S = 5.0


def require(*modules: str) -> None:
    """Raise `PackageMissing` if one of these is not installed; imports none.

    Off a terminal their progress bars, which are lines of a log there, stay away.
    """
    if not sys.stderr.isatty():
        for variable in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(variable, "1")
    for module in modules:
        if find_spec(module) is None:
            raise PackageMissing(
                f"{NAMES.get(module, module)} is not installed; run: {install_line('evals')}"
            )
    absent_hub()


@cache
def absent_hub() -> str | None:
    """Address of the hub where none answers; then the libraries, which would try it for minutes, ask none.

    What is on this machine is used instead. A user's own variable decides, as HF_HUB_OFFLINE does.
    """
    import httpx

    address = os.environ.get("HF_ENDPOINT", HUB)
    if any(name in os.environ for name in OFFLINE) or "huggingface_hub" in sys.modules:
        return None
    try:
        httpx.head(address, timeout=HUB_ANSWERS_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        os.environ["HF_HUB_OFFLINE"] = "1"
        return address
    return None

"""Libraries of evaluation harnesses, which ConServe does not depend on."""

import os
import sys
from importlib.util import find_spec

from conserve.errors import PackageMissing
from conserve.installation import install_line

NAMES = {"lm_eval": "lm-eval", "inspect_ai": "inspect_ai"}


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

"""Objects of classes of the user's, which flags name by their paths."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def made(path: str, what: str, methods: Mapping[str, str]) -> Any:
    """Make an object of the class `package.module.Class`, for the flag that takes `what`.

    `methods` are those that it must have, and their arguments. Raises ValueError with the reason and what to do.
    """
    module, _, cls = path.rpartition(".")
    try:
        own = getattr(import_module(module), cls)()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the {what} {path} cannot be made ({why}); install its module, or name its folder in PYTHONPATH"
        ) from error
    missing = [f"{name}({args})" for name, args in methods.items() if not callable(getattr(own, name, None))]
    if missing:
        raise ValueError(f"the {what} {path} has no method {' and no method '.join(missing)}; define it")
    return own

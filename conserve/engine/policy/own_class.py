"""Objects of classes of the user's, which flags name by their paths. Nothing that they raise ends the engine."""

import signal
import threading
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
    except BaseException as error:
        pass_interrupt(error)
        why = told(error)
        raise ValueError(
            f"the {what} {path} cannot be made ({why}); install its module, or name its folder in PYTHONPATH"
        ) from error
    missing = [f"{name}({args})" for name, args in methods.items() if not callable(getattr(own, name, None))]
    if missing:
        raise ValueError(f"the {what} {path} has no method {' and no method '.join(missing)}; define it")
    return own


def pass_interrupt(error: BaseException) -> None:
    """Raise what code of the user's has raised if it is Ctrl-C; nothing else of it ends the engine.

    Ctrl-C is a KeyboardInterrupt in a main thread that leaves SIGINT to Python. The process of vLLM's engine core
    handles its signals itself, and without exceptions, so there even SystemExit is the user's code.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raise error


def told(error: BaseException) -> str:
    """An exception's kind and words, which code of the user's makes too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no words"

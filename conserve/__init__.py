"""ConServe: run batch LLM work on the engine that serves live traffic, and never lose a row."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from conserve import errors as errors
    from conserve.api.engines import Engine as Engine
    from conserve.api.job import Job as Job
    from conserve.api.mapping import map as map
    from conserve.api.opening import open as open
    from conserve.api.results import Results as Results
    from conserve.api.running import Outcome as Outcome
    from conserve.api.store import Store as Store
    from conserve.store.books.readings import JobReading as JobReading
    from conserve.store.books.results import Result as Result
    from conserve.store.books.states import JobState as JobState

__version__ = "0.1.0"

MODULES = {
    "Engine": "api.engines",
    "Job": "api.job",
    "JobReading": "store.books.readings",
    "JobState": "store.books.states",
    "Outcome": "api.running",
    "Result": "store.books.results",
    "Results": "api.results",
    "Store": "api.store",
    "map": "api.mapping",
    "open": "api.opening",
}
"""Modules of the public names, which are imported when they are first used."""
__all__ = [*MODULES, "errors"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "errors":
        return import_module("conserve.errors")
    if name not in MODULES:
        raise AttributeError(f"module 'conserve' has no attribute {name!r}")
    found: object = getattr(import_module(f"conserve.{MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

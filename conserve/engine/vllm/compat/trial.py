"""Self-test of an installed vLLM: do the names that ConServe touches exist, and do overrides take what vLLM passes.

It imports vLLM and our modules that extend it, and takes seconds. A behaviour that changed under an old name passes
(`calls.HABITS`), but for the leaving of rows, which is tried (`rehearsal`).
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from conserve.engine.vllm.compat import rehearsal
from conserve.engine.vllm.compat.calls import OVERRIDING, SIGNATURES
from conserve.engine.vllm.compat.classes import CLASSES
from conserve.engine.vllm.compat.installed import InstalledEngine, install_command, untried, untried_engine
from conserve.engine.vllm.compat.internals import INTERNALS, ON_CPUS, Part
from conserve.engine.vllm.compat.versions import minor_of, name_in
from conserve.errors import EndpointUnusable

REST = "..."  # in SIGNATURES: other parameters may follow


class UnfitPart(NamedTuple):
    """A part of ConServe that does not fit the installed vLLM, and the cause."""

    part: Part
    cause: str


def lost_parts() -> Mapping[Part, str]:
    """Parts that an untried version of vLLM does without, and the first cause of each; none in a tried version."""
    engine = untried_engine()
    if engine is None:
        return {}
    lost = first_causes(engine.version)
    if Part.LEAVING not in lost and (fault := rehearsal.fault_of(engine)) is not None:
        lost = {**lost, Part.LEAVING: fault}
    return lost


@cache
def first_causes(version: str) -> Mapping[Part, str]:
    """Parts that do not fit this version, which is installed, and the first cause of each."""
    return {fault.part: fault.cause for fault in reversed(list(faults(version)))}


def require(*parts: Part, say: Callable[[str], None]) -> None:
    """Say what an untried version of vLLM does without; raises `EndpointUnusable` if it is one of these parts."""
    engine, told = untried_engine(), untried()
    if engine is None:
        return
    lost = first_causes(engine.version)
    for part in parts:
        if part in lost:
            raise EndpointUnusable(f"{told}, and {lost[part]}; {install_command()}")
    if Part.SCHEDULER in parts:  # else no row leaves an iteration
        if to_rehearse() is not None and not rehearsal.is_known(engine):
            say(f"{rehearsal.REHEARSING}, once for this version of vLLM, {rehearsal.usual_time(engine)}")
            rehearsal.rehearse(engine)
        lost = lost_parts()
    say(f"{told}; {said_of(lost)}")


def to_rehearse() -> InstalledEngine | None:
    """The installed vLLM, if it was never tried and has the names that rows need to leave."""
    engine = untried_engine()
    return None if engine is None or Part.LEAVING in first_causes(engine.version) else engine


def said_of(lost: Mapping[Part, str]) -> str:
    """The outcome of the self-test as a phrase."""
    if not lost:
        engine = untried_engine()
        same = "" if engine is None or rehearsal.fault_of(engine) else f", and {rehearsal.SAME_TOKENS}"
        return f"all {count_of_names()} names that ConServe uses are there{same}"
    return "; ".join(f"{part.value}: {cause}" for part, cause in lost.items())


def faults(version: str) -> Iterator[UnfitPart]:
    """Everything that this version, which is installed, lacks."""
    for part in Part:
        yield from (UnfitPart(part, cause) for cause in _missing_names(version, INTERNALS.get(part, {})))
        yield from (
            UnfitPart(part, cause) for cause in _changed_signatures(version, SIGNATURES.get(part, {}))
        )
        yield from (UnfitPart(part, cause) for cause in _changed_overrides(OVERRIDING.get(part, ())))


def count_of_names() -> int:
    """Number of names that are looked for."""
    return sum(1 for names in INTERNALS.values() for name in names for _ in expanded(name))


# Names


def expanded(name: str) -> Iterator[str]:
    """Every name that braces stand for, with the full name of its class."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", name)]
    for combination in itertools.product(*pieces):
        whole = "".join(combination)
        home = CLASSES.get(whole.split(".")[0])
        yield f"{home}.{whole}" if home else whole


def _missing_names(version: str, names: Mapping[str, str]) -> Iterator[str]:
    for name in itertools.chain.from_iterable(map(expanded, names)):
        here = name_in(minor_of(version), name)
        if here is None or (not _on_cpu() and any(word in here for word in ON_CPUS)):
            continue
        try:
            found(here)
        except Exception as error:  # an import may fail in any way
            yield f"{here} is not found ({_gist(error)})"


def found(name: str) -> Any:
    """The object of a full name; None for an attribute that only instances have. Raises if there is none."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            thing: Any = import_module(".".join(words[:count]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for word in words[count:]:
            thing = _attribute(thing, word)
        return thing
    raise ImportError(f"no module {words[0]}")


def _attribute(thing: Any, word: str) -> Any:
    missing = object()
    value = getattr(thing, word, missing)
    if value is not missing:
        return value
    if inspect.isclass(thing) and any(_given(cls, word) for cls in thing.__mro__):
        return None
    raise AttributeError(f"{getattr(thing, '__qualname__', thing)} has no {word}")


def _given(cls: type, word: str) -> bool:
    """True if instances of the class get this attribute: by an annotation, or by an assignment in its module."""
    if word in getattr(cls, "__annotations__", {}):
        return True
    if not cls.__module__.startswith("vllm"):
        return False
    return re.search(rf"\b\w+\.{word}\b[^=\n]*=|\bself\.{word},", _source(cls.__module__)) is not None


@cache
def _source(module: str) -> str:
    file = inspect.getsourcefile(import_module(module))
    return Path(file).read_text() if file else ""


# Signatures


def _changed_signatures(version: str, signatures: Mapping[str, str]) -> Iterator[str]:
    for name, wanted in signatures.items():
        here = name_in(minor_of(version), next(expanded(name)))
        if here is None:
            continue
        try:
            thing = found(here)
        except Exception as error:
            yield f"{here} is not found ({_gist(error)})"
            continue
        if cause := unlike(inspect.signature(thing), wanted):
            yield f"{here} {cause}"


def unlike(signature: inspect.Signature, wanted: str) -> str | None:
    """The first difference from the wanted parameters; None if calls with them still work."""
    first, rest, later = (part.strip(" ,") for part in wanted.partition(REST))
    names = [name.strip() for name in first.split(",") if name.strip()]
    parameters = list(signature.parameters.values())
    if [one.name for one in parameters[: len(names)]] != names:
        return f"takes ({', '.join(signature.parameters)}), not ({wanted})"
    others = parameters[len(names) :]
    if others and not rest:
        return f"takes {others[0].name} too"
    wanted_later = {name.strip() for name in later.split(",") if name.strip()}
    if missing := sorted(wanted_later - {one.name for one in others}):
        return f"takes no {missing[0]}"
    needed = (one for one in others if _is_needed(one) and one.name not in wanted_later)
    return next((f"needs {one.name} too" for one in needed), None)


def _is_needed(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not several


# Overrides


def _changed_overrides(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        try:
            cls = found(name)
        except Exception as error:
            yield f"{name} cannot be made ({_gist(error)})"
            continue
        yield from unfit_overrides(cls)


def unfit_overrides(cls: type) -> Iterator[str]:
    """Methods of ours that do not take what vLLM may pass to the methods they override."""
    abstract = sorted(getattr(cls, "__abstractmethods__", ()))
    if abstract:
        yield f"{cls.__name__} lacks {abstract[0]}"
    for number, ours in enumerate(cls.__mro__):
        if not ours.__module__.startswith("conserve"):
            continue
        for word, method in vars(ours).items():
            theirs = next((vars(base)[word] for base in cls.__mro__[number + 1 :] if _has(base, word)), None)
            if theirs is None or word == "__init__" or not callable(method) or not callable(theirs):
                continue
            if cause := _refuses(inspect.signature(method), inspect.signature(theirs)):
                yield f"{cls.__name__}.{word} {cause}"


def _has(base: type, word: str) -> bool:
    return base.__module__.startswith("vllm") and word in vars(base)


def _refuses(ours: inspect.Signature, theirs: inspect.Signature) -> str | None:
    """The first parameter that vLLM may pass and our method does not take."""
    parameters = [one for one in theirs.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    parameters = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    by_position = [one for one in parameters if _is_needed(one) and one.kind is not one.KEYWORD_ONLY]
    by_name = [one.name for one in parameters if one not in by_position]
    positions = [None] * len(by_position)
    try:
        ours.bind(*positions, **dict.fromkeys(by_name))
    except TypeError as error:
        return f"does not take what vLLM passes ({error})"
    return None


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _gist(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

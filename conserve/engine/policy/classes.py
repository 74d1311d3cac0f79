"""Classes of live traffic: promises of their own, and the requests that belong to each (docs/adr/0023).

A request belongs to the class of its key, else of its key's project, else of its model, else to the default one.
A caller may name another class that promises no more than its own; any class that is for anyone; and with the
harvester's key every class.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Self

from conserve.engine.policy.promises import LATENCIES, MEAN, Promises, rank
from conserve.engine.policy.view import DEFAULT_CLASS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SELECTORS = ("keys", "projects", "models")
FIELDS = ("ttft_slo_ms", "tbt_slo_ms", "harm", *SELECTORS, "anyone")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveClass:
    """Promises of a class, and the callers and models whose requests are of it."""

    promises: Promises
    keys: tuple[str, ...] = ()  # names of keys of the store
    projects: tuple[str, ...] = ()  # of such keys
    models: tuple[str, ...] = ()  # served names, LoRA adapters included
    anyone: bool  # every caller may ask for it

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Read a class as `document` writes it, default harms included; raises ValueError."""
        if unknown := sorted(said.keys() - set(FIELDS)):
            raise ValueError(f"a class has no {', '.join(unknown)}; it takes {', '.join(FIELDS)}")
        times = {"ttft_ms": said.get("ttft_slo_ms"), "tbt_ms": said.get("tbt_slo_ms")}
        promises = Promises.of({**times, "harm": said.get("harm")})
        for name in SELECTORS:
            named = said.get(name, ())
            if isinstance(named, str) or not all(isinstance(one, str) and one for one in named):
                raise ValueError(f"{name} takes a list of names, not {named!r}")
        return cls(
            promises=promises if "harm" in said else promises.with_default_harm(),
            **{name: tuple(said.get(name, ())) for name in SELECTORS},
            anyone=bool(said.get("anyone")),
        )

    def document(self) -> dict[str, Any]:
        """The class for JSON, without what is empty."""
        said = {
            "ttft_slo_ms": dict(self.promises.ttft_ms),
            "tbt_slo_ms": dict(self.promises.tbt_ms),
            "harm": self.promises.harm,
            **{name: list(getattr(self, name)) for name in SELECTORS},
            "anyone": self.anyone,
        }
        off = {} if self.promises == self.promises.with_default_harm() else {"harm": None}
        return {**off, **{name: value for name, value in said.items() if value}}


class ClassRefused(ValueError):
    """A request names a class that is not there, or that its caller may not ask for."""

    def __init__(self, why: str, *, unknown: bool) -> None:
        super().__init__(why)
        self.unknown = unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveClasses:
    """All classes of a server, and the promises of its default one. None of them may be `default`."""

    default: Promises = field(default_factory=Promises)
    named: Mapping[str, LiveClass] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Mapping[str, Mapping[str, Any]], default: Promises | None = None) -> Self:
        """Read classes by name; raises ValueError."""
        named = {}
        for name, one in said.items():
            require_name(name)
            try:
                named[name] = LiveClass.of(one)
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"the class {name}: {error}") from error
        for selector, value, claiming in claims(named):
            if len(claiming) > 1:
                raise ValueError(
                    f"{selector.removesuffix('s')} {value} is of the classes {' and '.join(claiming)}; give it one"
                )
        return cls(default=default or Promises(), named=named)

    def __bool__(self) -> bool:
        return bool(self.named)

    @property
    def names(self) -> list[str]:
        """All classes, the default one last."""
        return [*self.named, DEFAULT_CLASS]

    def promises_of(self, name: str) -> Promises:
        """Promises of a class."""
        return self.named[name].promises if name in self.named else self.default

    def own(self, *, key: str | None, project: str | None, models: Sequence[str]) -> str:
        """Class of a request that names none, by the name of its key, its key's project, and its model's names."""
        for selector, values in (("keys", [key]), ("projects", [project]), ("models", models)):
            for name, one in self.named.items():
                if any(value in getattr(one, selector) for value in values):
                    return name
        return DEFAULT_CLASS

    def chosen(self, own: str, asked: str | None, *, trusted: bool) -> str:
        """Class of a request that asks for one, or for None; raises `ClassRefused`.

        `trusted`: the caller may do everything.
        """
        if asked is None:
            return own
        if asked not in self.names:
            raise ClassRefused(
                f"there is no class {asked!r}; there are {', '.join(self.names)}", unknown=True
            )
        anyone = asked in self.named and self.named[asked].anyone
        if trusted or anyone or promises_no_more(self.promises_of(asked), self.promises_of(own)):
            return asked
        raise ClassRefused(
            f"the class {asked} promises what your class {own} does not: it wants the harvester's key, "
            "or a key of that class",
            unknown=False,
        )


def require_name(name: str) -> None:
    """Raise ValueError if no class can have this name."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"a class is letters, digits, - _ and ., at most 64, not {name!r}")
    if name == DEFAULT_CLASS:
        raise ValueError(
            f"{DEFAULT_CLASS} is the class of all other requests; promise it something with --ttft-slo, "
            "--tbt-slo or --harm"
        )


def claims(named: Mapping[str, LiveClass]) -> Iterator[tuple[str, str, list[str]]]:
    """Each key, project and model with the classes that claim it."""
    for selector in SELECTORS:
        values = {value: None for one in named.values() for value in getattr(one, selector)}
        for value in values:
            yield selector, value, [name for name, one in named.items() if value in getattr(one, selector)]


def promises_no_more(one: Promises, than: Promises) -> bool:
    """True if keeping the promises `than` keeps these too, default harms included."""
    times = all(
        implied(name, ms, getattr(than, latency))
        for latency in LATENCIES
        for name, ms in getattr(one, latency).items()
    )
    harms = ((one.slo.ttft_harm, than.slo.ttft_harm), (one.slo.tbt_harm, than.slo.tbt_harm))
    return times and all(mine is None or (theirs is not None and theirs <= mine) for mine, theirs in harms)


def implied(name: str, ms: float, bounds: Mapping[str, float]) -> bool:
    """True if these bounds keep a promise: the mean by a mean, a quantile by itself or a higher one."""
    if name == MEAN:
        return bounds.get(MEAN, inf) <= ms
    return any(bound <= ms and rank(other) >= rank(name) for other, bound in bounds.items())

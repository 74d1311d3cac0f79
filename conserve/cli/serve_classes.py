"""Classes of live traffic as users write them: a TOML file, and the flags --class and --class-for."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conserve.cli.serve_flags import promise, share
from conserve.errors import SettingsError

if TYPE_CHECKING:
    from conserve.config import Settings
    from conserve.store.books.keys import ApiKey

CLASS, CLASS_FOR, CLASSES = "--class", "--class-for", "--classes"
PROMISES = {"ttft": "ttft_slo_ms", "tbt": "tbt_slo_ms"}
LISTS = {"key": "keys", "project": "projects", "model": "models"}
ANYONE = "anyone"
PART = re.compile(r"\s*(ttft|tbt|harm):(.*)")
EXAMPLE = f"{CLASS} chat=ttft:p99=300ms,tbt:p99=50ms"
EXAMPLE_FOR = f"{CLASS_FOR} chat=key:NAME, =project:P, =model:M or ={ANYONE}"

Section = dict[str, dict[str, Any]]


def live_classes(file: Path | None, said: Sequence[str], uses: Sequence[str]) -> Section:
    """Classes by name, for the engine's section; raises `SettingsError`."""
    from conserve.engine.policy.classes import LiveClasses

    classes = {} if file is None else of_file(file)
    for text in said:
        name, one = of_flag(text)
        if name in classes:
            raise SettingsError(f"{CLASS} {text}: there is a class {name} already; give it once")
        classes[name] = one
    for text in uses:
        add_use(classes, text)
    try:
        return {name: one.document() for name, one in LiveClasses.of(classes).named.items()}
    except ValueError as error:
        raise SettingsError(f"{CLASSES if file is not None and not said else CLASS}: {error}") from error


def of_flag(text: str) -> tuple[str, dict[str, Any]]:
    """Read `chat=ttft:p50=100ms,p99=300ms,tbt:50ms,harm:10%`: the name, and its promises."""
    flag = f"{CLASS} {text}"
    name, _, promises = text.partition("=")
    said: dict[str, list[str]] = {}
    current: list[str] | None = None
    for part in promises.split(","):
        if found := PART.fullmatch(part):
            if found[1] in said:
                raise SettingsError(f"{flag} has {found[1]} twice; write ttft:p50=100ms,p99=300ms")
            current = said[found[1]] = []
            part = found[2]
        if current is None:
            raise SettingsError(f"{flag} promises nothing; write e.g. {EXAMPLE}")
        current.append(part)
    return name.strip(), promised(
        f"{CLASS} {name.strip()}", {kind: ",".join(parts) for kind, parts in said.items()}
    )


def promised(flag: str, said: Mapping[str, str]) -> dict[str, Any]:
    """Promises of a class for the engine's section, from texts by `ttft`, `tbt` and `harm`."""
    found: dict[str, Any] = {
        PROMISES[kind]: promise(f"{flag}: {kind}", said[kind]) for kind in PROMISES if kind in said
    }
    return {**found, "harm": share(f"{flag}: harm", said["harm"])} if "harm" in said else found


def add_use(classes: Section, text: str) -> None:
    """Add what a flag such as `chat=key:web` or `chat=anyone` says to its class."""
    flag = f"{CLASS_FOR} {text}"
    name, _, use = text.partition("=")
    if name not in classes:
        raise SettingsError(
            f"{flag}: there is no class {name!r}; give {CLASS} {name or 'chat'}=ttft:300ms too"
        )
    kind, _, value = use.partition(":")
    if use == ANYONE:
        classes[name][ANYONE] = True
    elif kind in LISTS and value:
        classes[name].setdefault(LISTS[kind], []).append(value)
    else:
        raise SettingsError(f"{flag} names no use; write {EXAMPLE_FOR}")


def of_file(file: Path) -> Section:
    """Read a TOML file with a table for each class; raises `SettingsError`."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{CLASSES} {file} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{CLASSES} {file} is no TOML: {error}") from error
    return {name: of_table(f"{CLASSES} {file}, class {name}", table) for name, table in tables.items()}


def of_table(place: str, table: Any) -> dict[str, Any]:
    """Read a class of a file."""
    names = (*PROMISES, "harm", *LISTS.values(), ANYONE)
    if not isinstance(table, dict):
        raise SettingsError(f'{place} is no table; write e.g. [chat] and below it ttft = "p99=300ms"')
    if unknown := [name for name in table if name not in names]:
        raise SettingsError(f"{place} has {', '.join(unknown)}; a class takes {', '.join(names)}")
    for name in LISTS.values():
        if not isinstance(table.get(name, []), list):
            raise SettingsError(f'{place}: {name} takes a list, e.g. {name} = ["{table[name]}"]')
    if not isinstance(table.get(ANYONE, False), bool):
        raise SettingsError(f"{place}: {ANYONE} is true or false, not {table[ANYONE]!r}")
    texts = {kind: text_of(table[kind]) for kind in (*PROMISES, "harm") if kind in table}
    return {
        **promised(place, texts),
        **{name: table[name] for name in (*LISTS.values(), ANYONE) if name in table},
    }


def text_of(said: Any) -> str:
    """A promise as the flags have it: a table of times by name is written out."""
    return ",".join(f"{name}={ms}" for name, ms in said.items()) if isinstance(said, dict) else str(said)


def require_keys(classes: Section, settings: "Settings", *, batches: bool, own_server: bool) -> None:
    """Raise if the server will not know a key or a project that chooses a class; `own_server`: --print-flags."""
    keys = [(name, key) for name, one in classes.items() for key in one.get("keys", ())]
    projects = [(name, project) for name, one in classes.items() for project in one.get("projects", ())]
    if not keys and not projects:
        return
    if own_server:
        raise SettingsError(
            "a vllm serve of your own knows no keys of the store; choose the class by its model"
        )
    if not batches:
        raise SettingsError("the process of the batches knows the store's keys; leave out --no-batches")
    known = known_keys(settings)
    for name, key in keys:
        if (why := why_unknown(key, known.get(key))) is not None:
            raise SettingsError(f"the class {name} is for a key {key!r} that {why}")
    for name, project in projects:
        if project not in {one.project for one in known.values() if why_unknown(one.name, one) is None}:
            raise SettingsError(
                f"the class {name} is for a project {project!r} without a key; "
                f"run: conserve keys add NAME --project {project}"
            )


def why_unknown(name: str, key: "ApiKey | None") -> str | None:
    """Reason that live requests cannot have this key, and the next command; None if they can."""
    if key is None:
        return f"the store has not; run: conserve keys add {name}"
    if key.revoked_at is not None:
        return "was revoked; make one of another name: conserve keys add NAME"
    if not key.live:
        return "is for batches alone; make one of another name: conserve keys add NAME --live"
    return None


def known_keys(settings: "Settings") -> dict[str, "ApiKey"]:
    """Keys that the store has or had, by name."""
    from conserve.store.books import keys
    from conserve.store.database.store import Store

    with closing(Store.open_to_read(settings)) as store, store.read() as tx:
        return {key.name: key for key in keys.everything(tx)}

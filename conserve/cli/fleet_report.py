"""The table and the JSON of `conserve fleet`."""

import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from conserve.api.servers import (
    ASKED_AT_ONCE,
    ENDED,
    OTHER_VERSION,
    REFUSES_LOGIN,
    WANTS_KEY,
    Unreported,
    ask,
    logins,
)
from conserve.cli import output
from conserve.config import Settings

if TYPE_CHECKING:
    from conserve.server_report import SchedulerReport
    from conserve.store.books.servers import Feeding, SeenServer

SILENT = "silent"  # its scheduler does not answer
REPORT_FRESH_S = 60.0  # age of its last report from then on: the figures in it are of another minute
UNSEEN = (
    WANTS_KEY,
    REFUSES_LOGIN,
    OTHER_VERSION,
)  # answers that leave its SLO unknown, until the user does something
BAD = ("down", "suspected", SILENT)
NOT_FED = "not fed"  # no harvester feeds it
GONE = "gone"  # no harvester feeds it, and nothing listens there: it was stopped, perhaps for good
COLOURS = {
    "serving": "green",
    "drained": "yellow",
    "draining": "yellow",
    **dict.fromkeys(BAD, "red"),
}
WORST_FIRST = ("suspected", "down", "busy", "starting", "leaving", "serving", "other model")
ATTAINED = 0.99  # share of live requests within the SLO, from which on it counts as kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A server with its own report, `GET /v1/conserve`, if it has one, else why it has none."""

    server: "SeenServer"
    report: "SchedulerReport | None" = None
    error: str | None = None
    now: float = 0.0  # by the clock of the notes

    @property
    def fresh(self) -> list["Feeding"]:
        """Notes of harvesters that still run."""
        return [feeding for feeding in self.server.feedings if feeding.is_fresh(self.now)]

    @property
    def rows_left(self) -> int:
        """Rows in flight at a drained server; a harvester that has not seen yet that it is counts as one."""
        since = self.server.drained_at or 0.0
        return sum(one.in_flight + one.waiting if one.noted_at >= since else 1 for one in self.fresh)

    @property
    def is_unheard(self) -> bool:
        """True if harvesters fed the server, of which none has ended, and none has noted anything lately."""
        return bool(self.server.feedings) and not self.fresh

    @property
    def silent_s(self) -> float | None:
        """Seconds for which its scheduler has not answered; None if it has in the last minute, or tells no age."""
        age_s = self.report.age_s if self.report is not None else None
        return age_s if age_s is not None and age_s >= REPORT_FRESH_S else None

    @property
    def state(self) -> str:
        """State of the server: its own, the worst that a harvester sees, or whether it is there where none does."""
        if self.silent_s is not None:
            return SILENT
        if self.server.drained_at is not None:
            return "draining" if self.rows_left else "drained"
        states = {feeding.state for feeding in self.fresh}
        otherwise = GONE if self.error == ENDED else NOT_FED
        return next((state for state in WORST_FIRST if state in states), next(iter(states), otherwise))

    @property
    def slo_kept(self) -> bool | None:
        """True if live requests had their SLO in the last minute; None if that is not known."""
        if self.report is None or not self.report.online.measured or self.silent_s is not None:
            return None
        online = self.report.online
        promises = [one.kept for _, bounds in online.promises.items() for one in bounds.values()]
        return all(promises) and online.attainment >= ATTAINED


def sights(found: Sequence[Sight], settings: Settings) -> list[Sight]:
    """The servers with their own reports; each is asked at the same time as the others."""

    known = logins(settings)

    def asked(sight: Sight) -> Sight:
        error = None
        for url in ways(known.get(sight.server.url, sight.server.url)):
            said = ask(url, settings)
            if not isinstance(said, Unreported):
                return replace(sight, report=said)
            if said.error is None:
                return sight
            # Only a server that no way leads to is gone.
            error = said.error if error in (None, ENDED) else error
        return replace(sight, error=error)

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        return list(pool.map(asked, found))


def ways(url: str) -> list[str]:
    """URLs under which a server may answer: one of this machine perhaps on its loopback address alone."""
    parts = urlsplit(url)
    if parts.hostname != socket.gethostname().lower():
        return [url]
    port = f":{parts.port}" if parts.port else ""
    login = "".join(parts.netloc.rpartition("@")[:2])
    return [url, parts._replace(netloc=f"{login}127.0.0.1{port}").geturl()]


def well(sight: Sight, *, rows_wait: bool = True) -> bool:
    """True unless the server is down or silent, or breaks its SLO, or keeps from the caller if it does.

    One is suspected until it has answered a row, which it cannot without any: then that counts for nothing.
    """
    suspected = sight.state == "suspected" and not rows_wait
    return (suspected or sight.state not in BAD) and sight.slo_kept is not False and sight.error not in UNSEEN


def unfed(found: Sequence[Sight]) -> bool:
    """True if a server is there that no harvester feeds, and none is fed."""
    return not any(sight.fresh for sight in found) and any(sight.state == NOT_FED for sight in found)


def document(sight: Sight) -> dict[str, Any]:
    """A server as JSON (docs/reference/json.md)."""
    server, fresh = sight.server, sight.fresh
    return {
        "url": server.url,
        "state": sight.state,
        "model": server.model,
        "version": server.version,
        "seen_at": output.iso(server.seen_at),
        "drained_at": output.iso(server.drained_at),
        "rows_in_flight": sum(one.in_flight for one in fresh),
        "rows_waiting": sum(one.waiting for one in fresh),
        "tokens_per_s": round(sum(one.tokens_per_s for one in fresh), 1),
        "slo_kept": sight.slo_kept,
        "attainment": None if sight.report is None else sight.report.online.attainment,
        "why": why(sight),
        "harvesters": [
            {
                "owner": one.owner,
                "state": one.state,
                "rows_in_flight": one.in_flight,
                "rows_waiting": one.waiting,
                "tokens_per_s": round(one.tokens_per_s, 1),
                "noted_at": output.iso(one.noted_at),
            }
            for one in fresh
        ],
    }


def why(sight: Sight) -> str | None:
    """Fault of a server, in its own words or those of a harvester; of one that is gone, why it counts as that."""
    if sight.silent_s is not None:
        return f"its scheduler has not answered for {output.duration(sight.silent_s)}: does its engine hang?"
    if sight.error in UNSEEN:
        return f"{sight.error}, or its SLO is not seen" if sight.error == WANTS_KEY else sight.error
    if sight.state == GONE:
        return f"{sight.error}, and no harvester feeds it"
    said = Counter(one.why for one in sight.fresh if one.why and one.state in (*BAD, "busy"))
    return said.most_common(1)[0][0] if said else None


def lines(found: Sequence[Sight]) -> list[str]:
    """Lines of the table, and one on each server with which something is wrong."""
    header = ("SERVER", "STATE", "MODEL", "ROWS", "TOKENS/S", "SLO", "VERSION", "SEEN")
    rows = [
        [
            sight.server.url,
            output.coloured(sight.state, COLOURS.get(sight.state)),
            sight.server.model or "-",
            f"{sum(one.in_flight for one in sight.fresh):,}",
            f"{sum(one.tokens_per_s for one in sight.fresh):,.0f}",
            slo(sight.slo_kept),
            sight.server.version or "-",
            ago(sight.server.seen_at, sight.now),
        ]
        for sight in found
    ]
    faults = [f"{sight.server.url}: {said}" for sight in found if (said := why(sight)) is not None]
    return [*output.columns(header, rows, right=(3, 4), shorten=(0, 2, 6)), *faults]


def slo(kept: bool | None) -> str:
    """State of the SLO, in a word."""
    if kept is None:
        return "-"
    return output.coloured("kept", "green") if kept else output.coloured("broken", "red")


def ago(seen_at: float | None, now: float) -> str:
    """Time since the last sign of life."""
    return "never" if seen_at is None else f"{output.duration(max(0.0, now - seen_at))} ago"

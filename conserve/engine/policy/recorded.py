"""Views and plans as lines of JSON, and back: what a policy saw, complete enough to be planned again.

One line an iteration: `{"version", "at", "policy", "view", "plan"}`. A candidate is an array of the fields of
`Candidate`. KV blocks are numbered within a line, in the order in which they are seen, and lists of them are runs
`[first, count]`: two requests share exactly the blocks with equal numbers. No line has a token of a prompt.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from conserve.engine.policy.kv_groups import KvGroup
from conserve.engine.policy.plan import Plan
from conserve.engine.policy.view import BY_CLASS, QUEUES, Candidate, Image, Lazy, Slo, View
from conserve.profiles.batch import Batch
from conserve.profiles.correction import CorrectedModel, FrozenModel
from conserve.profiles.model import TIMELESS, LatencyModel, LinearModel
from conserve.profiles.profile import MODELS

VERSION = 1
VERSION_OF_CLASSES = 2  # of views with classes of live traffic, which an earlier ConServe plans otherwise
VERSION_OF_PUSHING = 3  # of views with rows that push, for the same reason
VERSION_OF_AHEAD = 4  # of views of engines that schedule ahead
VERSION_OF_GROUPS = 5  # of views of models with several groups of KV blocks, or with LoRA adapters
VERSION_OF_KEPT = 6  # of views with KV blocks that rows do not take
VERSION_OF_IMAGES = 7  # of views with images or sounds to encode
VERSION_OF_PARKING = 8  # of views of engines whose rows may wait with their KV blocks
VERSION_OF_RESTING = 9  # of views with LoRA adapters of requests that wait a step
NEWEST = VERSION_OF_RESTING
# Waiting requests that are recorded beyond the free slots: a policy may look at some and defer them.
READ_ON = 32
RECORDED_AS = {  # names in all versions, of bounds and of a queue
    "stand_in_ttft_harm": "broken_ttft_harm",
    "stand_in_tbt_harm": "broken_tbt_harm",
    "waiting_with_blocks": "held",
}
BLOCKS = ("coming", "computing")
IF_ANY = ("pushed", "kv_groups", "adapters", "resting_adapters")  # left out where empty
PREFIX = Candidate._fields.index("prefix")  # the first of the fields that are not recorded as they are
NUMBERS = [
    field.name
    for field in fields(View)
    if field.name not in (*QUEUES, *BLOCKS, *BY_CLASS, *IF_ANY, "model", "slo")
]  # and truth values


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedIteration:
    """One iteration as it was planned."""

    at: float  # seconds since 1970
    policy: str
    view: View
    plan: Plan | None  # None where the policy left the iteration to vLLM


class _Blocks:
    """Numbers for the names of KV blocks."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def place(self, name: Hashable) -> float:
        """The block's number; behind all others if it has none yet."""
        return self._numbers.get(name, inf)

    def runs(self, names: Iterable[Hashable]) -> list[list[int]]:
        """The blocks' numbers as runs [first, count]; hashes of one prompt mostly make one run."""
        runs: list[list[int]] = []
        numbers = self._numbers
        for name in names:
            number = numbers.setdefault(name, len(numbers))
            if runs and runs[-1][0] + runs[-1][1] == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        return runs


def line_of(view: View, plan: Plan | None, *, policy: str, at: float) -> bytes:
    """The view and its plan as one line of JSON, without the line's end.

    Waiting requests are read further than the policy may have read them: as many as another policy could admit.
    """
    most = max(0, view.free_slots) + READ_ON
    waiting = (_read(view.waiting_online, most), _read(view.waiting_offline, most))
    queues = (view.online, view.offline, *waiting, view.waiting_with_blocks)
    return msgspec.json.encode(
        {
            "version": version_of(view, queues),
            "at": at,
            "policy": policy,
            "view": _view(view, queues),
            "plan": _plan(plan),
        }
    )


def version_of(view: View, queues: Iterable[Iterable[Candidate]] = ()) -> int:
    """The oldest version that plans the view as this one; `queues` are the requests that are recorded."""
    if view.resting_adapters:
        return VERSION_OF_RESTING
    if view.parks:
        return VERSION_OF_PARKING
    if any(one.images for queue in queues for one in queue):
        return VERSION_OF_IMAGES
    if view.kept_blocks:
        return VERSION_OF_KEPT
    if view.kv_groups or view.adapters:
        return VERSION_OF_GROUPS
    if view.ahead:
        return VERSION_OF_AHEAD
    if view.pushed:
        return VERSION_OF_PUSHING
    return VERSION_OF_CLASSES if view.slos else VERSION


def recorded(line: bytes) -> RecordedIteration:
    """Read a line that `line_of` has written; raises ValueError for anything else."""
    try:
        said = msgspec.json.decode(line)
        if said["version"] not in range(VERSION, NEWEST + 1):
            raise ValueError(
                f"this ConServe reads recorded views of versions {VERSION} to {NEWEST}, not {said['version']}"
            )
        view, plan = _view_of(said["view"]), _plan_of(said["plan"])
        return RecordedIteration(at=said["at"], policy=said["policy"], view=view, plan=plan)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no recorded view ({type(error).__name__}: {error})") from error


def read(path: Path) -> Iterator[RecordedIteration]:
    """The iterations of a file in their order. A line that a crash has cut short is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.rstrip().endswith(b"}"):
                yield recorded(line)


def _view(view: View, queues: Sequence[Iterable[Candidate]]) -> dict[str, Any]:
    blocks = _Blocks()
    return {
        "model": _model(view.model),
        "slo": _slo(view.slo),
        **(_by_class(view, queues) if view.slos else {}),
        **{name: getattr(view, name) for name in NUMBERS},
        **({"pushed": _pushed(view, queues)} if view.pushed else {}),
        **({"adapters": _of_recorded(view.adapters, queues)} if view.adapters else {}),
        **({"kv_groups": view.kv_groups} if view.kv_groups else {}),
        **({"resting_adapters": view.resting_adapters} if view.resting_adapters else {}),
        **{
            RECORDED_AS.get(name, name): [_candidate(one, blocks) for one in queue]
            for name, queue in zip(QUEUES, queues, strict=True)
        },
        **{name: blocks.runs(sorted(getattr(view, name), key=blocks.place)) for name in BLOCKS},
    }


def _view_of(said: Mapping[str, Any]) -> View:
    queues: dict[str, Any] = {
        name: [_candidate_of(one) for one in said[RECORDED_AS.get(name, name)]] for name in QUEUES
    }
    queues |= {name: frozenset(_blocks_of(said.get(name, ()))) for name in BLOCKS}
    return View(
        model=_model_of(said["model"]),
        slo=_slo_of(said["slo"]),
        slos={name: _slo_of(one) for name, one in said.get("slos", {}).items()},
        classes=said.get("classes", {}),
        served=said.get("served", {}),
        pushed=frozenset(said.get("pushed", ())),
        adapters=said.get("adapters", {}),
        resting_adapters=said.get("resting_adapters", ()),
        kv_groups=[KvGroup._make(one) for one in said.get("kv_groups", ())],
        **{name: said[name] for name in NUMBERS if name in said},
        **queues,
    )


def _candidate(one: Candidate, blocks: _Blocks) -> list[Any]:
    """The candidate's fields, without its images where it has none, as before there were any."""
    return [*one[:PREFIX], blocks.runs(one.prefix), *([one.images] if one.images else [])]


def _candidate_of(said: Sequence[Any]) -> Candidate:
    runs, *images = said[PREFIX:]
    seen = tuple(map(Image._make, images[0])) if images else ()
    return Candidate._make((*said[:PREFIX], _blocks_of(runs), seen))


def _by_class(view: View, queues: Iterable[Iterable[Candidate]]) -> dict[str, Any]:
    """Bounds and costs by class, and the classes of the requests that are recorded."""
    return {
        "slos": {name: _slo(one) for name, one in view.slos.items()},
        "classes": _of_recorded(view.classes, queues),
        "served": dict(view.served),
    }


def _of_recorded(of_requests: Mapping[str, Any], queues: Iterable[Iterable[Candidate]]) -> dict[str, Any]:
    """The entries of the requests that are recorded."""
    return {one.name: of_requests[one.name] for queue in queues for one in queue if one.name in of_requests}


def _pushed(view: View, queues: Iterable[Iterable[Candidate]]) -> list[str]:
    """The recorded requests that push."""
    return [one.name for queue in queues for one in queue if one.name in view.pushed]


def _slo(slo: Slo) -> dict[str, Any]:
    return {RECORDED_AS.get(field.name, field.name): _ms(getattr(slo, field.name)) for field in fields(Slo)}


def _slo_of(said: Mapping[str, Any]) -> Slo:
    bounds = {name: said.get(RECORDED_AS.get(name, name)) for name in (field.name for field in fields(Slo))}
    return Slo(**{name: None if bound is None else float(bound) for name, bound in bounds.items()})  # type: ignore[arg-type]


def _read(queue: Iterable[Candidate], most: int) -> list[Candidate]:
    """Requests of a queue that the policy has read, or its first ones, whichever are more."""
    read = queue.known if isinstance(queue, Lazy) else 0
    return list(islice(queue, max(read, most)))


def _blocks_of(runs: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(number for first, count in runs for number in range(first, first + count))


def _model(model: LatencyModel) -> dict[str, Any] | None:
    linear = model.model if isinstance(model, CorrectedModel | FrozenModel) else model
    if not isinstance(linear, LinearModel):
        return None
    said: dict[str, Any] = {"name": linear.name, "coefficients": linear.coefficients}
    if isinstance(model, CorrectedModel | FrozenModel):
        said |= {"scale": model.scale, "margins": [*model.margins.items()]}
    return said


def _model_of(said: Mapping[str, Any] | None) -> LatencyModel:
    if said is None:
        return TIMELESS
    linear = MODELS[said["name"]](said["coefficients"])
    if "scale" not in said:
        return linear
    return FrozenModel(linear, scale=said["scale"], margins=dict(said["margins"]))


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "tokens": plan.tokens,
        "batch": {field.name: getattr(plan.batch, field.name) for field in fields(Batch)},
        "admitted": plan.admitted,
        "restored": plan.restored,
        "evicted": plan.evicted,
        "predicted_ms": plan.predicted_ms,
        "online_ms": plan.online_ms,
        "limit_ms": _ms(plan.limit_ms),
        **({"parked": plan.parked} if plan.parked else {}),
        **({"pushed": plan.pushed} if plan.pushed else {}),
    }


def _plan_of(said: Mapping[str, Any] | None) -> Plan | None:
    if said is None:
        return None
    return Plan(
        tokens=said["tokens"],
        batch=Batch(**said["batch"]),
        admitted=said["admitted"],
        restored=said["restored"],
        evicted=said["evicted"],
        parked=said.get("parked", []),
        predicted_ms=said["predicted_ms"],
        online_ms=said.get("online_ms", 0.0),
        limit_ms=None if said["limit_ms"] is None else float(said["limit_ms"]),
        pushed=said.get("pushed", {}),
    )


def _ms(ms: float | None) -> float | str | None:
    """A time for JSON, which knows no infinity."""
    return "inf" if ms == inf else ms

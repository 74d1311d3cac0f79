"""Steps of a measurement: each notes its findings at once and keeps to its seconds."""

import contextlib
import json
import random
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple
from urllib.error import URLError

from tools.gpu import children, words
from tools.gpu.contents import kv_bytes_per_token
from tools.gpu.engines import KINDS, Size
from tools.gpu.results import FAILED, LEFT_OUT, Results
from tools.gpu.server import Server, StepFailed

BENCH = "online-only/planned,conserve,priority,non-preemptive/planned"
PAIR = "online-only/planned,conserve,conserve/harm"  # whose blocks end in time
ONLINE_ONLY = "online-only"  # on stock vLLM, beside
STOCK = f"{ONLINE_ONLY},online-only/planned,conserve,conserve/harm"
ABLATION = "online-only/planned,conserve,conserve/recompute,conserve/off,conserve/never"
OFF = "off"
SETTLE_S = 1.0  # until iterations under the last setting are through


@dataclass(kw_only=True)
class Run:
    """State that the steps of a call share: sizes, results, and the server that runs."""

    size: Size
    results: Results
    models: Path
    scratch: Path  # for stores and rows, which are no results
    more: list[str] = field(default_factory=list)  # further flags of vLLM
    policies: str = ""  # of comparisons, instead of a step's own
    server: Server | None = None
    kept: Path | None = None  # where a server is written down that the next call goes on with
    unusable: set[str] = field(
        default_factory=set
    )  # engines that did not start: a second try would take as long

    def __post_init__(self) -> None:
        """Go on with the server that an earlier call left."""
        if self.kept is not None:
            self.server = Server.left_at(self.kept, self.size, self.out)

    @property
    def out(self) -> Path:
        """Folder of results and logs."""
        return self.results.folder

    @property
    def model(self) -> str:
        """The model's folder."""
        return str(self.models / self.size.model)

    def serving(self, kind: str, step: str, limit_s: float) -> Server:
        """The server of this kind: the running one, or a new one."""
        if self.server is not None and (self.server.kind != kind or not self.server.alive):
            self.stop_server()
        if self.server is None:
            if kind in self.unusable:
                raise StepFailed("its server did not start for an earlier step")
            self.unusable.add(kind)
            limits = (self.out, self.scratch, self.more, limit_s)
            self.server = Server(kind, self.size, self.model, *limits)
            self.unusable.discard(kind)
            self.results.note(step, started_s=self.server.started_s, rows_s=self.server.rows_s)
        return self.server

    def leave_server(self) -> None:
        """Leave the server, if one runs, to the next call."""
        if self.server is not None and self.kept is not None:
            self.server.leave(self.kept)
            self.server = None

    def stop_server(self) -> None:
        """End the server, if one runs."""
        if self.server is not None:
            self.server.stop()
            self.server = None


def smoke(run: Run, step: str, _: str, limit_s: float) -> None:
    """vLLM alone on dummy weights: start, tokens per second, its choice of attention and graphs."""
    run.stop_server()
    log = run.out / "smoke.log"
    command = children.within("smoke", run.model, json.dumps(run.size.batch), *run.size.flags, *run.more)
    environment = {"VLLM_PLUGINS": ""}
    if run.size.rehearsal:  # a second process would import vLLM again
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found = children.run(command, log, limit_s, environment)
    run.results.note(step, **found, said=words.notable(log.read_text(errors="replace")))


def profile(run: Run, step: str, _: str, limit_s: float) -> None:
    """`conserve profile`: coefficients, error, copies of KV, a look at the flag."""
    run.stop_server()
    environment = {
        "CONSERVE_HOME": str(run.scratch / "home-profile"),
        "CONSERVE_ENGINE_LOG": str(run.out / "profile-engine.log"),
    }
    asked = ["profile", "--served", run.model, "--budget", str(run.size.profile_s), "--json"]
    asked += ["--", *run.size.flags, *run.more]
    found = children.run(children.conserve(*asked), run.out / "profile.log", limit_s, environment)
    if FAILED in found:
        run.results.note(step, failed=found[FAILED], log=found["log"])
        return
    best = found["models"][found["best"]]
    errors = {name: best.get(name) for name in ("mape", "p90_error", "p99_error", "overrun_share", "margin")}
    run.results.note(
        step, best=found["best"], **errors, kv_copies=found["kv_copies"], safepoint=found["safepoint"]
    )
    run.results.note(step, document=found)


def bare_copies(run: Run, step: str, _: str, limit_s: float) -> None:
    """Bare copies between pinned memory and the device, alone and beside matrix products."""
    run.stop_server()
    command = children.within("copies", str(run.size.copy_bytes), str(run.size.matrix))
    run.results.note(step, **children.run(command, run.out / "copies.log", limit_s))


def serve(run: Run, step: str, kind: str, limit_s: float) -> None:
    """Start `conserve serve`; note the engine's words before and after eight live requests beside rows."""
    one = run.serving(kind, step, limit_s)
    run.results.note(step, at_start=one.told(), said=words.notable(one.log.read_text(errors="replace")))
    run.results.note(step, live=arrive(one, 8, run.size.live))
    run.results.note(step, after=one.told(), queue=one.queue())


def reaction(run: Run, step: str, kind: str, limit_s: float) -> None:
    """Live requests one after the other beside rows: how soon rows leave, and tokens lost by that."""
    until = time.monotonic() + limit_s
    one = run.serving(kind, step, limit_s)
    before = one.report()
    if not before.get("alone"):
        raise StepFailed("the engine has no latency model, without which nothing has an SLO")
    # Tight enough that arrivals do not wait for an iteration's end.
    slo = {"ttft_ms": 4 * before["alone"]["ttft_ms"], "tbt_ms": 8 * before["alone"]["tbt_ms"]}
    one.change({"slo": slo})
    live = arrive(one, run.size.arrivals, run.size.short, until=until)
    run.results.note(step, slo=slo, arrivals=len(live), ttft_ms=spread([one["ttft_ms"] for one in live]))
    run.results.note(step, **words.counted(before, one.report()), told=one.told()["preemption"])
    one.change({"slo": {"ttft_ms": None, "tbt_ms": None}})


def arrive(
    one: Server, number: int, lengths: tuple[int, int], until: float | None = None
) -> list[dict[str, float]]:
    """Send live requests at random distances, until a time if there is one."""
    chance, answers = random.Random(0), []
    for seed in range(number):
        if until is not None and time.monotonic() > until:
            break
        with contextlib.suppress(URLError, TimeoutError, IndexError, KeyError):
            answers.append(one.ask(seed, lengths))
        time.sleep(chance.uniform(0.05, 0.3))
    if not answers:
        raise StepFailed("no live request was answered", children.tail(one.log))
    return answers


def spread(values: list[float]) -> dict[str, float]:
    """Median, P99 and largest."""
    if len(values) < 2:
        return {"p50": values[0], "p99": values[0], "max": values[0]}
    parts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(parts[49], 1), "p99": round(parts[98], 1), "max": max(values)}


def offline(run: Run, step: str, kind: str, limit_s: float) -> None:
    """Throughput of rows while nothing arrives, with the stamps of preemption and without."""
    until = time.monotonic() + limit_s
    one = run.serving(kind, step, limit_s)
    preemption = (one.report().get("preemption") or {}).get("policy", OFF)
    stamped = {"conserve": {"preemption": preemption}} if preemption != OFF else {}
    in_turn(run, step, one, {**stamped, "conserve/off": {"preemption": OFF}}, until)


def copies(run: Run, step: str, kind: str, limit_s: float) -> None:
    """Throughput of rows while their KV is copied to host memory and while it is not; bytes per second."""
    until = time.monotonic() + limit_s
    one = run.serving(kind, step, limit_s)
    off = {"checkpoint": OFF}
    settings = {"conserve/recompute": off, "conserve": {"checkpoint": "on"}}
    if (one.report().get("checkpoint") or {}).get("policy", OFF) == OFF:
        run.results.note(step, why_off=one.told()["checkpoint"]["why_off"])
        settings = {"conserve/recompute": off}
    found = in_turn(run, step, one, settings, until)
    kv_bytes = kv_bytes_per_token(json.loads((Path(run.model) / "config.json").read_text()))
    rates = [kv_bytes * one["tokens_saved_per_s"] / 1e9 for one in found.get("conserve", [])]
    run.results.note(
        step, kv_bytes_per_token=kv_bytes, saved_gb_per_s=rates, checkpoint=one.told()["checkpoint"]
    )


def in_turn(
    run: Run, step: str, one: Server, settings: Mapping[str, Mapping[str, Any]], until: float
) -> dict[str, list[dict[str, float]]]:
    """Readings of each setting in turn, so that drift hits all; afterwards the server has its old setting."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    began = one.report()
    for _ in range(run.size.turns):
        for name, wanted in settings.items():
            if time.monotonic() + SETTLE_S + run.size.window_s > until:
                break
            found[name].append(window(one, wanted, run.size.window_s))
            run.results.note(step, readings=found, **words.compared(found))
    preemption = (began.get("preemption") or {}).get("policy", OFF)
    checkpoint = OFF if (began.get("checkpoint") or {}).get("policy", OFF) == OFF else "on"
    one.change({"preemption": preemption, "checkpoint": checkpoint})
    run.results.note(step, queue=one.queue())
    if not all(found.values()):
        raise StepFailed("its seconds ended before every setting had a reading")
    if not all(one["tokens_per_s"] for of in found.values() for one in of):
        raise StepFailed("no row was computed during a reading")
    return found


def window(one: Server, wanted: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """One reading under a setting."""
    one.change(wanted)
    time.sleep(SETTLE_S)
    before, began = one.report(), time.monotonic()
    time.sleep(seconds)
    after = one.report()
    return words.reading(before, after, time.monotonic() - began)


def bench(run: Run, step: str, kind: str, limit_s: float) -> None:
    """`conserve bench` at each rate: live latencies and throughput of rows under the policies."""
    compare(run, step, kind, limit_s, BENCH)


def pair(run: Run, step: str, kind: str, limit_s: float) -> None:
    """`conserve bench` at each rate: ConServe under an SLO and under a bound on harm, beside online-only."""
    compare(run, step, kind, limit_s, PAIR)


def ablation(run: Run, step: str, kind: str, limit_s: float) -> None:
    """`conserve bench` at each rate: ConServe without checkpoints, without preemption, and without leaving."""
    compare(run, step, kind, limit_s, ABLATION)


def compare(run: Run, step: str, kind: str, limit_s: float, policies: str) -> None:
    """Compare policies, or those that the call names instead, on one server, at each rate that still fits."""
    until, policies = time.monotonic() + limit_s, run.policies or policies
    one = run.serving(kind, step, limit_s)
    needed_s, played = bench_s(policies, run.size), 0
    for rate in run.size.rates:
        if until - time.monotonic() < needed_s:
            left = until - time.monotonic()
            why = f"it needs {needed_s:.0f} s, and {left:.0f} s are left"
            run.results.note(step, **{f"at {rate:g}/s": {LEFT_OUT: why}})
            continue
        folder, log = run.scratch / f"{step}-{rate:g}", run.out / f"{step}.log"
        asked = [*bench_words(run.size, rate, policies, folder), "--endpoint", one.url]
        if ONLINE_ONLY in policies.split(","):
            asked += ["--stock-endpoint", str(one.stock_url)]
        try:
            found = children.run(children.conserve(*asked), log, until - time.monotonic(), one.environment)
        finally:
            pack(run, folder)
        run.results.note(step, **{f"at {rate:g}/s": found}, told=one.told(), queue=one.queue())
        played += 1
        if FAILED in found:
            raise StepFailed(f"conserve bench: {found[FAILED]}", found["log"])
    if not played:
        run.results.note(step, left_out="no rate fits")


def stock(run: Run, step: str, kind: str, limit_s: float) -> None:
    """`conserve bench` at each rate: ConServe, and live requests alone on stock vLLM and under the plug-in."""
    compare(run, step, kind, limit_s, STOCK)


def bench_words(size: Size, rate: float, policies: str, folder: Path) -> list[str]:
    """Command line of `conserve bench`, without the server."""
    words = ["bench", "--gamma", f"{rate:g},0.5,{size.lengths}", "--policies", policies, "--rounds", "1"]
    return [*words, "--block-s", str(size.block_s), "--json", "-o", str(folder)]


def pack(run: Run, folder: Path) -> None:
    """Put a folder of raw results, if there are any, into one archive: runners bring only some files back."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(run.out / f"{folder.name}.tar.gz", "w:gz") as tar:
        for file in sorted(folder.iterdir()):
            if file.is_file():
                tar.add(file, arcname=f"{folder.name}/{file.name}")


def bench_s(policies: str, size: Size) -> float:
    """Seconds that a comparison needs: the blocks, the end of their last answers, and its start."""
    return 1.1 * size.block_s * len(policies.split(",")) + 15


class Step(NamedTuple):
    """A step on one kind of engine."""

    work: Callable[[Run, str, str, float], None]
    kind: str
    least_s: float  # with less it is left out
    most_s: float


def step_table() -> dict[str, Step]:
    """All steps in an order in which they may run."""
    table = {
        "smoke": Step(smoke, "", 60, 230),
        "bare-copies": Step(bare_copies, "", 20, 60),
        "profile": Step(profile, "", 150, 260),
    }
    leaving = ("default", "eager-v1", "eager-v2")
    kinds: dict[str, tuple[str, ...]] = {
        "serve": (*leaving, "shared", "sync", "plain"),
        "reaction": (*leaving, "shared"),
        "offline": (*leaving, "shared", "sync", "plain"),
        "copies": ("saving",),
        "pair": leaving,
        "bench": (*leaving, "shared"),
        "ablation": ("default", "eager-v1"),
        "stock": ("shared",),
    }
    works: dict[str, tuple[Callable[[Run, str, str, float], None], float, float]] = {
        "serve": (serve, 60, 240),
        "reaction": (reaction, 40, 120),
        "offline": (offline, 45, 110),
        "copies": (copies, 130, 330),
        "pair": (pair, 120, 460),
        "bench": (bench, 120, 460),
        "ablation": (ablation, 120, 540),
        "stock": (stock, 150, 400),
    }
    for kind in KINDS:
        for name, (work, least_s, most_s) in works.items():
            if kind in kinds[name]:
                table[f"{name}-{kind}"] = Step(work, kind, least_s, most_s)
    return table


STEPS = step_table()

"""Additions of the plug-in to vLLM's API server, on an app without an engine behind it."""

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from tests.warned import OF_VLLM

pytest.importorskip("fastapi")

from fastapi import FastAPI, Response
from prometheus_client.parser import text_string_to_metric_families

from conserve import __version__
from conserve.engine.policy.preemption import LEAVE_RULES
from conserve.engine.policy.promises import Promises
from conserve.engine.vllm.profiling.learning import require_model, scheduler_says
from conserve.engine.vllm.server import metrics
from conserve.engine.vllm.server.metrics import COUNTS, MetricsRoute
from conserve.engine.vllm.server.plugin import Surface
from conserve.engine.vllm.server.privileges import CALLER, SLO, Caller, Role
from conserve.engine.vllm.server.reports import LastReports
from conserve.errors import ProfileMissing
from conserve.names import OFF
from conserve.server_report import PATH, SPILL_PATH, read
from conserve.variables import SUPERVISOR
from tests import virtual_time
from tests.installed import needs
from tests.server_reports import MODEL, document, promised, told

SAID: dict[str, Any] = document(
    slo={**promised("ttft_ms", p99=1500.0), "harm": 0.1},
    live_prefixes={"kept_blocks": 31, "prompt_tokens": 5000, "found_tokens": 1200, "lost_tokens": 160},
    pushing={"largest_slo_scale": 1.25, "slo_scale": 1.25, "rows": 2, "tokens": 900},
    latency_model=MODEL,
    online={
        "requests": 12,
        "attainment": 0.75,
        "held_back": ["ttft_ms", "tbt_ms"],
        "paused_for": ["ttft_ms"],
        "way_ms": {"ttft_ms": {"p99": 7.0}},
        "promises": {
            "ttft_ms": {"p99": {"promised_ms": 1500.0, "seen_ms": None, "kept": True}},
            "tbt_ms": {"mean": {"promised_ms": 60.0, "seen_ms": 45.0, "kept": True}},
        },
        "counts": {"ttft_ms": {"all": 12, "late": 3}},
        "histograms": {"ttft_ms": {"bounds_ms": [500.0], "counts": [9, 3], "sum_ms": 4000.0}},
    },
    offline={"tokens": 3456, "tokens_per_s": 7.0},
    iterations=100,
    planned=90,
    overruns=1,
    standstills=2,
    busy_s=2.5,
    harm={
        "pauses": 8,
        "ttft_ms": {"p50": {"with_ms": 210.0, "without_ms": 200.0, "ratio": 1.05, "low": 0.9, "high": None}},
    },
    preemption={
        "iterations_left": 4,
        "abandoned": 3,
        "rows": 9,
        "layers_run": 40,
        "tokens_redone": 512,
        "tokens_wasted": 128.5,
        "reaction_ms": {"p50": 5.0, "p99": 14.0},
    },
    checkpoint={
        "policy": "adaptive",
        "tokens_saved": 4096,
        "tokens_restored": 2048,
        "tokens_recomputed": 77,
        "restores": 5,
        "blocks_failed": 2,
        "blocks_refused": 6,
    },
)


class EngineClient:
    """Answers the scheduler's utility call as `reply` says; keeps what it was asked."""

    def __init__(self, reply: Callable[[], Any] = lambda: SAID, *, control: bool = True) -> None:
        self.asked: list[Any] = []
        self._reply = reply
        self.engine_core = self
        self.core_engines = [b"0"]
        self.vllm_config = Namespace(
            additional_config={"conserve": {"control": control}}, scheduler_config=Namespace(max_num_seqs=8)
        )

    async def _call_utility_async(self, method: str, change: Any, *, engine: bytes) -> Any:
        assert method == "conserve"
        assert engine in self.core_engines
        self.asked.append(change)
        said = self._reply()
        return await said if asyncio.iscoroutine(said) else said


def app_for(client: EngineClient, *, wait_s: float = 0.05) -> FastAPI:
    """VLLM's /metrics with our routes over it, put together as vLLM does."""
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    app = FastAPI()
    app.state.engine_client = client

    @app.get("/metrics")
    def theirs() -> Response:
        raise AssertionError("vLLM's own route answers")

    class Quick(Surface):
        def attach_router(self, app: FastAPI) -> None:
            super().attach_router(app)
            app.router.routes.pop(0)
            MetricsRoute(LastReports(scheduler_says), wait_s=wait_s).attach(app)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.plugins.load_endpoint_plugins", lambda tasks: [Quick()])
        attach_endpoint_plugins(app, ("generate",))
    return app


async def get(app: FastAPI, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.get(path)


async def post(app: FastAPI, content: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        body = content if isinstance(content, str) else json.dumps(content)
        return await client.post(PATH, content=body)


def ours(answer: httpx.Response, *, age: bool = False) -> dict[str, Any]:
    """Our samples of an exposition, those with labels by their quantile; with `age`, the report's too."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name.startswith("conserve_") and (age or sample.name != "conserve_report_age_seconds")
    }


pytestmark = [
    needs("vllm"),
    *OF_VLLM,
]


def test_no_counter_falls_where_rows_leave_an_iteration_that_counted() -> None:
    tokens = iter([50, 40, 60])
    app = app_for(EngineClient(lambda: document(offline={"tokens": next(tokens)})))

    async def shown() -> list[float]:
        return [ours(await get(app, "/metrics"))["conserve_offline_tokens_total"] for _ in range(3)]

    assert virtual_time.run(shown()) == [50, 50, 60]


@pytest.mark.parametrize(("weights", "identity"), [(None, "m@1"), ("default.1", "m@1+default.1")])
def test_weights_that_were_replaced_are_another_model(weights: str | None, identity: str) -> None:
    app = app_for(EngineClient(lambda: {**SAID, "weights": weights}))
    app.state.conserve_identity = "m@1"
    answer = virtual_time.run(get(app, PATH))
    assert answer.json()["identity"] == identity


def test_an_answer_is_what_its_readers_take_it_for() -> None:
    app = app_for(EngineClient())
    app.state.conserve_identity = "m@1"
    for query in ("", "?within_s=1"):
        answer = virtual_time.run(get(app, f"{PATH}{query}"))
        said = read(answer.content)
        facts = msgspec.to_builtins(said.front_end)
        assert told({**facts, **msgspec.to_builtins(said.scheduler)}) == told(answer.json())


def test_metrics_are_vllms_with_the_schedulers_counters() -> None:
    client = EngineClient()
    answer = virtual_time.run(get(app_for(client), "/metrics"))
    found = ours(answer)
    assert found == {
        f"conserve_build_info/serve/{__version__}": 1,
        "conserve_online_requests_total": 12,
        "conserve_offline_tokens_total": 3456,
        "conserve_iterations_total": 100,
        "conserve_planned_iterations_total": 90,
        "conserve_overruns_total": 1,
        "conserve_standstills_total": 2,
        "conserve_busy_seconds_total": 2.5,
        "conserve_iterations_left_total": 4,
        "conserve_abandoned_iterations_total": 3,
        "conserve_rows_leaving_total": 9,
        "conserve_layers_before_leaving_total": 40,
        "conserve_tokens_redone_total": 512,
        "conserve_tokens_wasted_total": 128.5,
        "conserve_live_tokens_recomputed_total": 0,
        "conserve_kv_tokens_saved_total": 4096,
        "conserve_kv_tokens_restored_total": 2048,
        "conserve_kv_tokens_recomputed_total": 77,
        "conserve_kv_restores_total": 5,
        "conserve_kv_blocks_failed_total": 2,
        "conserve_kv_blocks_refused_total": 6,
        "conserve_slo_attainment": 0.75,
        "conserve_rows_held_back/ttft": 1,
        "conserve_rows_held_back/tbt": 1,
        "conserve_rows_paused/ttft": 1,
        "conserve_rows_paused/tbt": 0,
        "conserve_receipt_pauses_total": 8,
        "conserve_harm_limit/ttft": 0.1,
        "conserve_harm_limit/tbt": 0.1,
        "conserve_slo_scale": 1.25,
        "conserve_pushed_tokens_total": 900,
        "conserve_live_prompt_tokens_total": 5000,
        "conserve_live_prefix_tokens_found_total": 1200,
        "conserve_live_prefix_tokens_lost_total": 160,
        "conserve_live_prefix_blocks": 31,
        "conserve_harm_ratio/estimate/ttft/p50": 1.05,
        "conserve_harm_ratio/low/ttft/p50": 0.9,
        "conserve_promised_seconds/ttft/p99": 1.5,
        "conserve_promised_seconds/tbt/mean": 0.06,
        "conserve_promise_seen_seconds/tbt/mean": 0.045,
        "conserve_way_seconds/ttft/p99": 0.007,
        "conserve_leave_reaction_seconds/p50": 0.005,
        "conserve_leave_reaction_seconds/p99": 0.014,
        "conserve_live_latencies_total/ttft": 12,
        "conserve_live_latencies_total/tbt": 0,
        "conserve_live_late_total/ttft": 3,
        "conserve_live_late_total/tbt": 0,
        "conserve_live_ttft_seconds_bucket/0.5": 9,
        "conserve_live_ttft_seconds_bucket/+Inf": 12,
        "conserve_live_ttft_seconds_count": 12,
        "conserve_live_ttft_seconds_sum": 4,
        "conserve_live_tbt_seconds_bucket/+Inf": 0,
        "conserve_live_tbt_seconds_count": 0,
        "conserve_live_tbt_seconds_sum": 0,
    }
    assert len(COUNTS) == 25
    assert "# TYPE conserve_iterations_left_total counter" in answer.text
    assert "# TYPE python_info gauge" in answer.text  # from the registry that vLLM shows
    assert client.asked == [None]


def test_metrics_leave_out_what_was_not_measured() -> None:
    found = ours(virtual_time.run(get(app_for(EngineClient(document)), "/metrics")))
    names = {name.partition("/")[0] for name in found}
    assert {name for name in names if not name.endswith("_total")} == {
        "conserve_build_info",
        "conserve_slo_attainment",
        "conserve_rows_held_back",
        "conserve_rows_paused",
        "conserve_slo_scale",
        "conserve_live_prefix_blocks",
        *(
            f"conserve_live_{latency}_seconds_{of}"
            for latency in ("ttft", "tbt")
            for of in ("bucket", "count", "sum")
        ),
    }, "no promise, harm, latency or reaction"


def test_beside_another_scheduler_metrics_are_vllms() -> None:
    answer = virtual_time.run(get(app_for(EngineClient(lambda: None)), "/metrics"))
    assert ours(answer) == {}
    assert "python_info" in answer.text


def test_a_scheduler_that_does_not_answer_in_time_is_asked_once_and_shown_as_it_was() -> None:
    async def go() -> None:
        slow = asyncio.Event()
        slow.set()

        async def reply() -> Any:
            await slow.wait()
            return document(iterations=len(client.asked))

        async def iterations() -> float:
            return ours(await get(app, "/metrics"))["conserve_iterations_total"]

        client = EngineClient(reply)
        app = app_for(client)
        assert await iterations() == 1
        slow.clear()
        assert await asyncio.gather(*(iterations() for _ in range(3))) == [1, 1, 1]
        assert len(client.asked) == 2
        await asyncio.sleep(metrics.STALE_S)
        assert ours(await get(app, "/metrics"), age=True) == {
            f"conserve_build_info/serve/{__version__}": 1.0,
            "conserve_report_age_seconds": pytest.approx(metrics.STALE_S, abs=1.0),
        }, "figures that are a minute old are left out"
        assert len(client.asked) == 2
        slow.set()
        await asyncio.sleep(1.0)
        assert await iterations() == 3, "asked anew"

    virtual_time.run(go())


def test_a_scheduler_in_the_middle_of_an_iteration_has_its_last_report_shown_with_its_age() -> None:
    async def go() -> None:
        over = asyncio.Event()

        async def reply() -> Any:
            await over.wait()
            return {**SAID, "iterations": len(client.asked)}

        client = EngineClient(reply)
        app, path = app_for(client), f"{PATH}?within_s=1"
        assert (await get(app, path)).status_code == 503, "nothing was reported yet"
        over.set()
        assert (await get(app, path)).json()["age_s"] == 0
        over.clear()
        await asyncio.sleep(3)
        last = (await get(app, path)).json()
        assert (last["age_s"], last["iterations"], last["version"]) == (4.0, 1, __version__)
        over.set()
        assert (await get(app, PATH)).json()["iterations"] == 3, "without the parameter it is waited for"

    virtual_time.run(go())


def test_a_dead_engine_does_not_take_the_metrics_with_it() -> None:
    def die() -> Any:
        raise RuntimeError("the engine core is dead")

    replies = iter([lambda: SAID, die, die])
    app = app_for(EngineClient(lambda: next(replies)()))

    async def go() -> None:
        for _ in range(3):
            assert ours(await get(app, "/metrics"))["conserve_iterations_left_total"] == 4

    virtual_time.run(go())


@pytest.mark.parametrize("name", [*LEAVE_RULES, OFF])
def test_preemption_is_changed_over_http(name: str) -> None:
    client = EngineClient()
    answer = virtual_time.run(post(app_for(client), {"policy": "conserve", "preemption": name}))
    assert answer.status_code == 200
    assert answer.json()["preemption"]["iterations_left"] == 4
    assert client.asked == [{"policy": "conserve", "preemption": name}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"preemption": "sometimes"},
        {"preemption": None},
        {"preemption": ["off"]},
        {"preemption": {}},
        {"preempt": "off"},
        {"checkpoint": "eager"},
        {"checkpoint": "off\n"},
        {"checkpoint": []},
        {"policy": "fair"},
        {"policy": None},
        {"hygen": {"tokens": 0}},
        {"slo": {"ttft_ms": 0}},
        {"slo": {"ttft_ms": "soon"}},
        {"slo": None},
        [],
        "not JSON",
    ],
)
def test_a_wrong_change_is_refused_with_an_example_and_the_names(wrong: Any) -> None:
    client = EngineClient()
    answer = virtual_time.run(post(app_for(client), wrong))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    for words in ('"preemption": "off"', '"checkpoint": "on"', *LEAVE_RULES, OFF):
        assert words in message
    assert client.asked == []


def test_without_control_nothing_is_changed() -> None:
    client = EngineClient(control=False)
    answer = virtual_time.run(post(app_for(client), {"preemption": "off"}))
    assert answer.status_code == 403
    assert answer.json() == {
        "error": {
            "message": "this engine keeps its policy and its SLO",
            "type": "invalid_request_error", "param": None, "code": 403,
        }
    }  # fmt: skip
    assert client.asked == []


class SpillingEngine(EngineClient):
    """Writes for two looks."""

    async def call_utility_async(self, method: str, change: Any) -> Any:
        assert method == "conserve_spill"
        self.asked.append(change)
        return {"writing": len(self.asked) < 3, "blocks_spilled": 7 * (len(self.asked) == 3)}


@pytest.mark.parametrize(
    ("secret", "sent", "status"),
    [("sesame", "sesame", 200), ("sesame", "", 403), ("sesame", "séame", 403), ("", "", 403)],
)
def test_only_who_started_the_server_has_kv_written(
    secret: str, sent: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUPERVISOR, secret)
    client = SpillingEngine()

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_for(client)), base_url="http://server"
        ) as http:
            return await http.post(SPILL_PATH, headers={SUPERVISOR: sent.encode()})

    answered = virtual_time.run(ask())
    assert answered.status_code == status
    if status == 200:
        assert answered.json() == {"writing": False, "blocks_spilled": 7}
        assert client.asked == ["begin", "end", "end"]
    else:
        assert not client.asked


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/embeddings", 404, "NotFoundError"),
        ("GET", "/v2/none", 404, "NotFoundError"),
        ("DELETE", "/metrics", 405, "invalid_request_error"),
    ],
)
def test_what_the_server_lacks_is_refused_in_openais_form(
    method: str, path: str, status: int, kind: str
) -> None:
    app = app_for(EngineClient())

    async def go() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, json={})

    answer = virtual_time.run(go())
    assert answer.status_code == status
    assert answer.json() == {
        "error": {
            "message": f"this server does not answer {method} {path}; GET /openapi.json lists its routes",
            "type": kind, "param": None, "code": status,
        }
    }  # fmt: skip


def test_the_server_says_whether_rows_may_go_on_with_the_key_that_asks() -> None:
    app = app_for(EngineClient())
    for caller, resumes in (
        (None, True),
        (Caller(role=Role.HARVESTER), True),
        (Caller(role=Role.CLIENT), False),
    ):
        token = CALLER.set(caller)
        assert virtual_time.run(get(app, PATH)).json()["resumes"] is resumes
        CALLER.reset(token)


def test_the_guard_knows_the_slo_as_it_is_now() -> None:
    app = app_for(EngineClient())
    virtual_time.run(get(app, PATH))
    assert getattr(app.state, SLO) == 1500.0


def test_an_slo_is_refused_where_there_is_no_latency_model() -> None:
    client = EngineClient(lambda: {**SAID, "latency_model": None})
    client.vllm_config.additional_config["conserve_installed"] = {
        "command": "conserve profile --served tiny --seed 1",
        "times": None,
    }
    app = app_for(client)
    refused = virtual_time.run(post(app, {"slo": {"tbt_ms": 100}}))
    assert refused.status_code == 409
    message = refused.json()["error"]["message"]
    assert message.startswith("--tbt-slo cannot be kept: this engine has no latency model")
    assert message.endswith("measure one with: conserve profile --served tiny --seed 1")
    assert client.asked == [None]
    assert virtual_time.run(post(app, {"slo": {"tbt_ms": None}})).status_code == 200


def test_an_engine_without_a_latency_model_starts_without_an_slo_alone() -> None:
    unknown: dict[str, Any] = {"latency_model": None}
    require_model(unknown, {"ttft_ms": None, "tbt_ms": None})
    require_model(SAID, {"ttft_ms": 1.0, "tbt_ms": 1.0})
    with pytest.raises(ProfileMissing, match=r"^--ttft-slo and --tbt-slo cannot be kept") as refused:
        require_model(unknown, {"ttft_ms": 1.0, "tbt_ms": 1.0})
    assert str(refused.value).endswith("measure one with: conserve profile --served MODEL FLAGS")


class Learner(EngineClient):
    """Has a latency model once it was asked so many times."""

    def __init__(self, looks: int, runner_type: str = "generate") -> None:
        super().__init__(lambda: {"latency_model": {"name": "conserve"} if len(self.asked) > looks else None})
        self.vllm_config.model_config = Namespace(runner_type=runner_type)


@pytest.mark.parametrize(("looks", "more"), [(0, 0), (3, 3)])
def test_a_warm_up_goes_on_until_the_scheduler_has_a_model(
    looks: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conserve.engine.vllm.profiling import learning
    from conserve.engine.vllm.profiling.warm_up import Growth, WarmUpGroup, insist

    served: list[WarmUpGroup] = []

    async def serve(group: WarmUpGroup) -> None:
        served.append(group)

    async def warm_up(llm: Any, *, say: Any, seconds: float, known: Any) -> None:
        await insist(Growth(seconds=1, longest=100, most=4), serve, known)

    monkeypatch.setattr(learning, "warm_up", warm_up)
    said: list[str] = []
    virtual_time.run(learning.learn(Learner(looks), say=said.append))
    assert len(served) == more
    assert said == []


def test_an_engine_that_learns_nothing_is_given_up_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from conserve.engine.vllm.profiling import learning

    asked = []

    async def warm_up(llm: Any, *, say: Any, seconds: float, known: Any) -> None:
        asked.append(await known())

    monkeypatch.setattr(learning, "warm_up", warm_up)
    said: list[str] = []
    virtual_time.run(learning.learn(Learner(10_000), say=said.append))
    assert asked == [False]
    assert said == ["the warm-up taught too little; the first requests go on with it"]
    virtual_time.run(learning.learn(Learner(10_000, "pooling"), say=said.append))
    assert asked == [False], "a model that generates nothing cannot be warmed up"


@pytest.mark.parametrize(
    ("slo", "limited"),
    [
        (Promises.of({"ttft_ms": 300.0, "default_harm": 0.1}), {"tbt": 0.1}),
        (Promises.of({"tbt_ms": 50.0, "default_harm": 0.1}), {"ttft": 0.1}),
        (Promises.of({"ttft_ms": 300.0, "tbt_ms": 50.0}), {}),
        (Promises.of({"ttft_ms": 300.0}), {}),
    ],
)
def test_a_harm_limit_is_of_the_latency_that_it_bounds(slo: Promises, limited: dict[str, float]) -> None:
    client = EngineClient(lambda: {**SAID, "slo": slo.document()})
    found = ours(virtual_time.run(get(app_for(client), "/metrics")))
    limits = {name: value for name, value in found.items() if name.startswith("conserve_harm_limit")}
    assert limits == {f"conserve_harm_limit/{latency}": value for latency, value in limited.items()}
    client = EngineClient(lambda: {**SAID, "slo": slo.document(), "policy": "priority"})
    kept = ours(virtual_time.run(get(app_for(client), "/metrics")))
    assert kept == {name: value for name, value in found.items() if name not in limits}

"""Classes of live traffic: as users write them, the class of a request, and what each may ask for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from conserve.cli import serve_notices, server_status
from conserve.cli.serve_classes import live_classes, require_keys
from conserve.cli.server_status import AskedServer
from conserve.config import load
from conserve.engine.policy.classes import ClassRefused, LiveClass, LiveClasses, promises_no_more
from conserve.engine.policy.promises import Promises
from conserve.engine.policy.view import DEFAULT_CLASS
from conserve.engine.runtime.traffic import Traffic
from conserve.engine.section import EngineSection
from conserve.errors import SettingsError
from conserve.names import DEFAULT_HARM
from conserve.store.books import keys
from conserve.store.database.store import Store
from tests.commands import conserve
from tests.server_reports import of_class, promised, report

FILE = """
[chat]
ttft = "p99=300ms"
tbt = {p50 = "20ms", p99 = 50}
keys = ["web"]

[agent]
ttft = "2s"
anyone = true
"""
CHAT = {"ttft_slo_ms": {"p99": 300.0}, "tbt_slo_ms": {"p50": 20.0, "p99": 50.0}, "keys": ["web"]}
AGENT = {"ttft_slo_ms": {"p99": 2000.0}, "anyone": True}


# As users write them.


def test_a_file_and_flags_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(FILE)
    assert live_classes(file, [], []) == {"chat": CHAT, "agent": AGENT}
    flags = ["chat=ttft:p99=300ms,tbt:p50=20ms,p99=50", "agent=ttft:2s"]
    assert live_classes(None, flags, ["chat=key:web", "agent=anyone"]) == {"chat": CHAT, "agent": AGENT}
    assert live_classes(file, ["notes=harm:5%"], ["notes=model:lora", "agent=project:search"]) == {
        "chat": CHAT,
        "agent": {**AGENT, "projects": ["search"]},
        "notes": {"harm": 0.05, "models": ["lora"]},
    }
    assert live_classes(None, [], []) == {}


@pytest.mark.parametrize(
    ("said", "uses", "fault"),
    [
        (["chat"], [], r"--class chat promises nothing; write e.g. --class chat=ttft:p99=300ms,tbt:p99=50ms"),
        (["chat=300ms"], [], "promises nothing"),
        (["chat=tft:300ms"], [], "promises nothing"),
        (["chat=ttft:"], [], "--class chat: ttft takes a time like 1500ms or 1.5s, not ''"),
        (["chat=ttft:1s,ttft:2s"], [], "has ttft twice"),
        (["chat=ttft:p50=2s,p99=1s"], [], "p99 cannot be less than p50"),
        (["chat=harm:5"], [], "--class chat: harm takes a share like 10%, or off, not '5'"),
        (["default=ttft:1s"], [], "default is the class of all other requests; promise it something with"),
        (["a chat=ttft:1s"], [], "a class is letters, digits, - _ and ., at most 64, not 'a chat'"),
        (["a=ttft:1s", "a=tbt:1s"], [], "there is a class a already; give it once"),
        (["a=ttft:1s", "b=ttft:1s"], ["a=key:k", "b=key:k"], "key k is of the classes a and b; give it one"),
        ([], ["a=key:k"], "there is no class 'a'; give --class a=ttft:300ms too"),
        (["a=ttft:1s"], ["a=key:"], "names no use; write --class-for chat=key:NAME"),
        (["a=ttft:1s"], ["a=everyone"], "names no use"),
    ],
)  # fmt: skip
def test_each_fault_of_a_flag_is_told_in_a_sentence(said: list[str], uses: list[str], fault: str) -> None:
    with pytest.raises(SettingsError) as refused:
        live_classes(None, said, uses)
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[chat", "is no TOML"),
        ('chat = "300ms"', "class chat is no table; write e.g. [chat] and below it ttft"),
        ('[chat]\nttf = "1s"', "class chat has ttf; a class takes ttft, tbt, harm, keys, projects, models, anyone"),
        ('[chat]\nkeys = "web"', 'class chat: keys takes a list, e.g. keys = ["web"]'),
        ('[chat]\nanyone = "yes"', "class chat: anyone is true or false, not 'yes'"),
        ('[chat]\nttft = "soon"', "class chat: ttft takes a time like 1500ms or 1.5s, not 'soon'"),
        ("[chat]\nkeys = [1]", "--classes: the class chat: keys takes a list of names, not [1]"),
    ],
)  # fmt: skip
def test_each_fault_of_a_file_is_told_in_a_sentence(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as refused:
        live_classes(file, [], [])
    assert fault in str(refused.value)


def test_a_file_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(SettingsError, match=r"--classes nowhere\.toml cannot be read: No such file"):
        live_classes(Path("nowhere.toml"), [], [])


def test_keys_that_the_server_will_not_know_are_refused_before_it_starts(store: Store) -> None:
    settings = load({"home": store.home})
    chosen = {"chat": {"keys": ["web"]}, "agent": {"projects": ["search"]}}
    open_to_all = {"chat": {"models": ["lora"]}}
    require_keys(open_to_all, settings, batches=False, own_server=True)
    with pytest.raises(SettingsError, match="knows no keys of the store; choose the class by its model"):
        require_keys(chosen, settings, batches=True, own_server=True)
    with pytest.raises(SettingsError, match="leave out --no-batches"):
        require_keys(chosen, settings, batches=False, own_server=False)
    with pytest.raises(SettingsError, match="the store has not; run: conserve keys add web"):
        require_keys(chosen, settings, batches=True, own_server=False)
    with store.write() as tx:
        keys.add(tx, "web", project="pages", now=0.0)
    with pytest.raises(SettingsError, match="run: conserve keys add NAME --project search"):
        require_keys(chosen, settings, batches=True, own_server=False)
    with store.write() as tx:
        keys.add(tx, "crawler", project="search", now=0.0)
    require_keys(chosen, settings, batches=True, own_server=False)
    with store.write() as tx:
        keys.revoke(tx, "web", now=1.0)
        keys.add(tx, "nightly", project="crawls", now=0.0, live=False)
    for one, why in (
        ({"keys": ["web"]}, "'web' that was revoked; make one of another name: conserve keys add NAME"),
        ({"keys": ["nightly"]}, "'nightly' that is for batches alone; make one of another name: conserve"),
        ({"projects": ["pages"]}, "'pages' without a key; run: conserve keys add NAME --project pages"),
        ({"projects": ["crawls"]}, "'crawls' without a key"),
    ):
        with pytest.raises(SettingsError, match=why):
            require_keys({"chat": one}, settings, batches=True, own_server=False)


def test_a_fault_ends_the_command_with_its_sentence(tmp_path: Path) -> None:
    done = conserve("serve", "smollm2-demo", "--class", "chat", CONSERVE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "conserve: --class chat promises nothing; write e.g." in done.stderr


def test_a_policy_without_an_slo_says_that_it_ignores_classes() -> None:
    section = EngineSection(policy="priority", classes={"chat": CHAT})
    assert serve_notices.only_counted(section) == [
        "--policy priority knows no SLO: --class is counted, and not kept"
    ]


# The class of a request.


def classes(**named: dict[str, Any]) -> LiveClasses:
    return LiveClasses.of(named, Promises.of({"ttft_ms": 1000}))


BOTH = classes(
    chat={**CHAT, "models": ["quick"]}, agent={**AGENT, "projects": ["search"]}, night={"keys": ["n"]}
)


@pytest.mark.parametrize(
    ("key", "project", "models", "own"),
    [
        (None, None, [], DEFAULT_CLASS),
        ("web", "pages", [], "chat"),
        ("crawler", "search", [], "agent"),
        (None, None, ["base", "quick"], "chat"),
        ("crawler", "search", ["quick"], "agent"),  # a key comes before a model, which any client may name
        ("web", "search", [], "chat"),
        ("other", "pages", ["base"], DEFAULT_CLASS),
        ("n", None, [], "night"),
    ],
)
def test_the_class_follows_from_the_key_then_the_project_then_the_model(
    key: str | None, project: str | None, models: list[str], own: str
) -> None:
    assert BOTH.own(key=key, project=project, models=models) == own


def test_a_class_without_a_promise_has_the_usual_harm() -> None:
    assert LiveClass.of({"keys": ["n"]}).promises == Promises(harm=DEFAULT_HARM)
    off = LiveClass.of({"harm": None})
    assert not off.promises.any
    assert LiveClass.of(off.document()) == off


def test_without_promises_the_default_class_has_none() -> None:
    assert classes(chat=CHAT).promises_of(DEFAULT_CLASS) == Promises.of({"ttft_ms": 1000})
    assert LiveClasses.of({"chat": CHAT}).promises_of(DEFAULT_CLASS) == Promises()
    assert not LiveClasses()
    assert LiveClasses() == LiveClasses.of({})


def test_a_class_with_a_field_that_no_class_has_is_refused() -> None:
    unknown = {"slo": 300, "key": "web", "model": "lora", "tbt": 40, "all": True}
    with pytest.raises(
        ValueError, match=r"^a class has no all, key, model, slo, tbt; it takes ttft_slo_ms, .* anyone$"
    ):
        LiveClass.of({**unknown, "models": ["lora"]})
    with pytest.raises(ValueError, match="the class chat: a class has no slo"):
        classes(chat={"slo": 300})
    with pytest.raises(ValueError, match="keys takes a list of names, not 'web'"):
        LiveClass.of({"keys": "web"})
    with pytest.raises(ValueError, match=r"keys takes a list of names, not \['web', ''\]"):
        LiveClass.of({"keys": ["web", ""]})


@pytest.mark.parametrize(
    ("own", "asked", "allowed"),
    [
        ("chat", None, True),
        ("chat", "chat", True),
        ("chat", "agent", True),  # 2 s rather than 300 ms
        ("chat", DEFAULT_CLASS, True),  # 1 s
        (DEFAULT_CLASS, "agent", True),  # for anyone
        (DEFAULT_CLASS, "chat", False),
        ("agent", "chat", False),
        ("agent", DEFAULT_CLASS, False),
        ("chat", "night", False),  # a harm, which chat is not promised
    ],
)
def test_a_caller_may_ask_for_less_than_its_own_class_has(own: str, asked: str | None, allowed: bool) -> None:
    assert BOTH.chosen(own, asked, trusted=True) == (asked or own)
    if allowed:
        assert BOTH.chosen(own, asked, trusted=False) == (asked or own)
        return
    with pytest.raises(ClassRefused, match="wants the harvester's key") as refused:
        BOTH.chosen(own, asked, trusted=False)
    assert not refused.value.unknown


def test_a_class_that_is_not_there_is_named_with_the_ones_that_are() -> None:
    with pytest.raises(
        ClassRefused, match="there is no class 'chta'; there are chat, agent, night, default"
    ) as no:
        BOTH.chosen("chat", "chta", trusted=True)
    assert no.value.unknown


@pytest.mark.parametrize(
    ("one", "than", "no_more"),
    [
        ({}, {}, True),
        ({"ttft_ms": 300}, {}, False),
        ({}, {"ttft_ms": 300}, True),
        ({"ttft_ms": {"p50": 300}}, {"ttft_ms": {"p99": 300}}, True),
        ({"ttft_ms": {"p99": 300}}, {"ttft_ms": {"p50": 300}}, False),
        ({"tbt_ms": {"mean": 30}}, {"tbt_ms": {"mean": 20}}, True),
        ({"tbt_ms": {"mean": 30}}, {"tbt_ms": {"mean": 30}}, True),
        ({"tbt_ms": {"p50": 30}}, {"tbt_ms": {"mean": 20}}, False),
        ({"tbt_ms": {"mean": 30}}, {"tbt_ms": {"p99": 20}}, False),
        ({"harm": 0.2}, {"harm": 0.1}, True),
        ({"harm": 0.2}, {"harm": 0.2}, True),
        ({"harm": 0.1}, {"harm": 0.2}, False),
        ({"harm": 0.1}, {"ttft_ms": 1}, False),
        ({"ttft_ms": 2, "default_harm": 0.1}, {"ttft_ms": 1, "tbt_ms": 1}, False),
        ({"ttft_ms": 2, "default_harm": 0.1}, {"ttft_ms": 1, "default_harm": 0.1}, True),
        ({"ttft_ms": 2, "default_harm": 0.1}, {"ttft_ms": 1, "harm": 0.1}, True),
        ({"ttft_ms": 2}, {"ttft_ms": 1, "default_harm": 0.1}, True),
    ],
)
def test_one_promise_is_kept_by_another(one: dict[str, Any], than: dict[str, Any], no_more: bool) -> None:
    assert promises_no_more(Promises.of(one), Promises.of(than)) is no_more


# Accounts and figures.


def test_each_class_has_its_own_account_and_its_own_figures() -> None:
    traffic = Traffic(
        Promises.of({"ttft_ms": 1000}),
        classes={"chat": Promises.of({"ttft_ms": 300, "tbt_ms": {"p50": 40, "p99": 100}})},
    )
    for name, live_class, ttft_s, gap_s in (
        ("a", "chat", 0.2, 0.05),
        ("b", None, 0.5, 0.4),
        ("c", "gone", 0.9, 0.4),
    ):
        traffic.arrived(name, 10, at=0.0, live_class=live_class)
        traffic.tokens([name], at=ttft_s)
        traffic.tokens([name], at=ttft_s + gap_s)
    said = traffic.report(now=2.0)
    assert said["classes"]["chat"]["ttft_ms"] == {"p50": pytest.approx(200), "p99": pytest.approx(200)}
    assert said["classes"]["chat"]["slo"]["ttft_ms"] == 300
    assert said["classes"]["chat"]["promises"]["tbt_ms"]["p50"]["kept"] is False
    assert said["classes"][DEFAULT_CLASS]["requests"] == 2, (
        "one of a class that is not there is of the default one"
    )
    assert said["online"]["requests"] == 3
    assert said["online"]["ttft_ms"]["p99"] == pytest.approx(900)
    assert said["online"]["attainment"] == 1.0
    assert traffic.bounds_by_class()["chat"].tbt_ms == 40, "its median is owed something"
    assert traffic.bounds_by_class()[DEFAULT_CLASS].tbt_ms > 1e9
    assert traffic.bounds(now=2.0).ttft_ms == 300, "whichever class arrives"
    for name in ("a", "b", "c"):
        traffic.finished(name)
    assert not traffic.class_of
    assert not any(one.busy for one in traffic._classes.values())


def test_harm_of_a_class_that_no_request_uses_holds_nothing_up() -> None:
    traffic = Traffic(Promises(harm=0.1), classes={"chat": Promises.of({"ttft_ms": 300})})
    assert traffic.bounds(now=0.0).harm == 0.1, "nothing has come yet, and anything may"
    traffic.arrived("a", 10, at=0.0, live_class="chat")
    assert traffic.bounds(now=1.0).harm is None
    traffic.arrived("b", 10, at=2.0)
    assert traffic.bounds(now=3.0).harm == 0.1
    assert traffic.bounds(now=100.0).harm == 0.1


def test_harm_of_a_class_holds_for_as_long_as_a_request_of_it_decodes() -> None:
    traffic = Traffic(Promises.of({"ttft_ms": 300}), classes={"agents": Promises(harm=0.1)})
    traffic.arrived("long", 10, at=0.0, live_class="agents")
    traffic.tokens(["long"], at=1.0)
    traffic.arrived("chat", 10, at=90.0)
    assert traffic.bounds(now=91.0).harm == 0.1
    traffic.finished("long")
    assert traffic.bounds(now=91.0).harm is None


def test_a_class_that_was_idle_saves_nothing_up() -> None:
    traffic = Traffic(classes={"chat": Promises(harm=0.1), "agent": Promises(harm=0.1)})
    traffic.arrived("a", 10, at=0.0, live_class="agent")
    traffic.computed({"agent": 5000.0})
    traffic.arrived("c", 10, at=1.0, live_class="chat")
    assert traffic.served["chat"] == 5000
    traffic.computed({"chat": 100.0})
    traffic.arrived("d", 10, at=1.0, live_class="chat")
    assert traffic.served["chat"] == 5100, "it is busy: nothing is forgotten"
    for name in ("a", "c", "d"):
        traffic.finished(name)
    traffic.arrived("e", 10, at=2.0, live_class="chat")
    assert traffic.served == {"chat": 0, "agent": 0, DEFAULT_CLASS: 0}, "after a pause all begin alike"


def test_the_default_class_keeps_its_own_ttft_beside_a_tighter_class() -> None:
    own = Promises.of({"ttft_ms": 1000.0})
    traffic = Traffic(own, classes={"chat": Promises.of({"ttft_ms": 300.0})})
    assert [traffic.ttft_ms(name) for name in ("chat", None, DEFAULT_CLASS, "unknown")] == [
        300,
        1000,
        1000,
        1000,
    ]
    assert Traffic(own).ttft_ms(None) is None, "without classes all have the bounds of the next iteration"


REPORT = report(
    slo={"harm": 0.1},
    online={
        "requests": 5,
        "ttft_ms": {"p50": 90.0, "p99": 900.0},
        "tbt_ms": {"p50": 9.0, "p99": 30.0},
        "attainment": 0.9,
        "held_back": ["ttft_ms"],
    },
    classes={
        "chat": of_class(
            slo=promised("ttft_ms", p99=300.0),
            requests=4,
            attainment=0.975,
            held_back=["ttft_ms"],
            ttft_ms={"p50": 90.0, "p99": 280.0},
            tbt_ms={"p50": 9.0, "p99": 30.0},
            promises={"ttft_ms": {"p99": {"promised_ms": 300.0, "seen_ms": 280.0, "kept": True}}},
            counts={"ttft_ms": {"all": 4, "late": 1}},
        ),
        "default": of_class(slo={"harm": 0.1}, requests=1),
    },
)


def test_status_shows_each_class() -> None:
    assert server_status.lines([AskedServer("http://s", REPORT)])[1:5] == [
        "  online   TTFT 90/900 ms, TBT 9/30 ms",
        "    chat     TTFT 90/280 of 300 ms, TBT 9/30 ms, SLO kept 97.5%, 4 requests since the start",
        "    default  TTFT -, TBT -, rows add at most about 10%, 1 request since the start",
        "  rows add about 10% at most to TTFT, which is late too often to keep its SLO; raise it, or add a server",
    ]


def test_metrics_have_the_label_class() -> None:
    pytest.importorskip("fastapi")
    from conserve.engine.vllm.server.metrics import Report

    text = generate_latest(Report(REPORT, {})).decode()  # type: ignore[arg-type]
    for line in (
        'conserve_online_requests_total{class="chat"} 4.0',
        'conserve_slo_attainment{class="default"} 1.0',
        'conserve_rows_held_back{class="chat",latency="ttft"} 1.0',
        'conserve_live_latencies_total{class="chat",latency="ttft"} 4.0',
        'conserve_live_late_total{class="chat",latency="ttft"} 1.0',
        'conserve_promised_seconds{class="chat",latency="ttft",promise="p99"} 0.3',
        'conserve_promise_seen_seconds{class="chat",latency="ttft",promise="p99"} 0.28',
        'conserve_live_latency_seconds{class="chat",latency="tbt",quantile="p99"} 0.03',
    ):
        assert line in text
    assert "conserve_online_requests_total 5" not in text, "the classes add up to it"


# In vLLM's API server.


def asked(engine: Any, caller: Any, extra: dict[str, Any] | None = None, *, priority: int = 0) -> Any:
    """The class that the engine core would read, or the status that the client gets."""
    from vllm.exceptions import GracefulHTTPError
    from vllm.sampling_params import SamplingParams

    from conserve.engine.vllm.server.live_classes import classing
    from conserve.engine.vllm.server.privileges import CALLER, permitting

    params = SamplingParams(extra_args=extra)
    token = CALLER.set(caller)
    try:
        classing(permitting(lambda *args, **rest: None))(engine, None, params, "1", priority=priority)
    except GracefulHTTPError as refused:
        return int(refused.http_status), str(refused)
    finally:
        CALLER.reset(token)
    return (params.extra_args or {}).get("conserve_class")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_request_reaches_the_engine_with_its_class() -> None:
    pytest.importorskip("vllm")
    from conserve.engine.vllm.server.live_classes import MODEL
    from conserve.engine.vllm.server.privileges import Caller, Role

    section = {"classes": {"chat": {**CHAT, "models": ["quick"]}, "agent": AGENT}}
    engine = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"conserve": section}))
    web, plain = Caller(role=Role.CLIENT, key="web"), Caller(role=Role.CLIENT, ttft_slo_ms=1500.0)
    assert asked(engine, web) == "chat"
    assert asked(engine, plain) == "default"
    assert asked(engine, plain, {"conserve_class": "agent"}) == "agent"
    assert asked(engine, Caller(role=Role.CLIENT, asked_class="agent")) == "agent", "by its header"
    assert asked(engine, plain, {"conserve_class": "chat"})[0] == 403
    assert asked(engine, plain, {"conserve_class": "chta"})[0] == 400
    assert asked(engine, None, {"conserve_class": "chat"}) == "chat", "a server without keys lets all ask"
    assert asked(engine, web, {"conserve_class": "chat"}, priority=1000) == "chat", (
        "offline: nothing is looked at"
    )
    assert asked(engine, plain, {"conserve_class": 7})[0] == 400
    status, why = asked(engine, web, {"conserve_ttft_ms": 200})
    assert status == 403
    assert "below the TTFT of the class chat, 300 ms" in why
    assert asked(engine, web, {"conserve_ttft_ms": 400}) == "chat"
    token = MODEL.set("quick")
    assert asked(engine, plain) == "chat", "by its model"
    MODEL.reset(token)
    without = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))
    assert asked(without, plain, {"conserve_class": "chat"}) == "chat", "without classes nothing is looked at"

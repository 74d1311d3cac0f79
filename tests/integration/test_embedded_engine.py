"""The embedded endpoint on the real engine: one start per class, never two engines at once."""

import asyncio
import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

import conserve
from conserve.endpoints.protocol import Call, Completion, InFlight, OnTokens, Url
from conserve.engine.vllm.embedded import EmbeddedEndpoint
from conserve.engine.vllm.launching import fork_server
from conserve.engine.vllm.launching.environment import engine_log
from conserve.engine.vllm.launching.phases import told
from conserve.engine.vllm.model.demo_model import DEMO_MODEL
from conserve.errors import EndpointUnusable, EngineDied, RequestRejected, SettingsError
from conserve.variables import FORK_SERVER
from tests.warned import OF_VLLM

T = TypeVar("T")
Cores = frozenset[int]

# vLLM raises the last one on every chat request.
pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Mapping[str, Any] = {"messages": FRANCE, "temperature": 0, "max_tokens": 24}


class Engine:
    """An endpoint with an event loop to live in, for tests that are not coroutines."""

    def __init__(self, endpoint: EmbeddedEndpoint) -> None:
        self.endpoint = endpoint
        self._runner = asyncio.Runner()
        self._calls = 0

    def run(self, work: Awaitable[T]) -> T:
        async def waiting() -> T:
            return await work

        return self._runner.run(waiting())

    def call(self, body: Mapping[str, Any], *, url: Url = Url.CHAT, resume_from: Sequence[int] = ()) -> Call:
        self._calls += 1
        return Call(key=f"row-{self._calls}", url=url, body=body, resume_from=resume_from)

    def complete(self, body: Mapping[str, Any], on_tokens: OnTokens | None = None, **call: Any) -> Completion:
        return self.run(self.endpoint.complete(self.call(body, **call), on_tokens))

    def tokens(self, body: Mapping[str, Any], **call: Any) -> tuple[Completion, list[int]]:
        """The completion, and the ids of its tokens."""
        return self.run(self._tokens(self.call(body, **call)))

    def resumed(
        self, body: Mapping[str, Any], beginnings: Sequence[Sequence[int]], **call: Any
    ) -> list[tuple[Completion, list[int]]]:
        """Completions from each of these saved beginnings, all at once, with the ids of their tokens."""

        async def together() -> list[tuple[Completion, list[int]]]:
            calls = [self.call(body, resume_from=saved, **call) for saved in beginnings]
            return await asyncio.gather(*map(self._tokens, calls))

        return self.run(together())

    async def _tokens(self, call: Call) -> tuple[Completion, list[int]]:
        seen: list[int] = []

        def keep(tokens: Sequence[int]) -> None:
            assert list(tokens[: len(seen)]) == seen, "tokens reported earlier never change"
            seen[:] = tokens

        return await self.endpoint.complete(call, keep), seen

    def close(self) -> None:
        self.run(self.endpoint.close())
        self._runner.close()


def started(model: str, cache_dir: Path, *flags: str) -> Iterator[Engine]:
    engine = Engine(EmbeddedEndpoint(model, engine_flags=flags, cache_dir=cache_dir))
    engine.run(engine.endpoint.start())
    yield engine
    engine.close()
    assert processes_left() == [], "closing leaves no process behind"


def processes_left() -> list[str]:
    """Our children, but for those that are kept for the next engine, and the one that multiprocessing keeps."""
    kept = (
        ("resource_tracker", "ForkServer", "read _ || kill")
        if fork_server.SERVER.environment
        else ("resource_tracker",)
    )
    return [
        line
        for child in psutil.Process().children(recursive=True)
        if (line := cmdline(child)) and not any(word in line for word in kept)
    ]


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def engine_cores() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "EngineCore" in cmdline(child)]


def cuts(tokens: Sequence[int]) -> list[Sequence[int]]:
    """Every beginning, the whole among them."""
    return [tokens[:cut] for cut in range(1, len(tokens) + 1)]


def facts(completion: Completion) -> tuple[str, str, int, int]:
    """Parts that a resumed answer shares with the uninterrupted one."""
    (choice,) = completion.choices
    return choice.text, choice.finish_reason, completion.prompt_tokens, completion.completion_tokens


@pytest.fixture(scope="class")
def tiny(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M")
    yield from started(str(tiny_llama), tmp_path_factory.mktemp("cache"), *flags)


@pytest.fixture(scope="class")
def demo(demo_cache: Path) -> Iterator[Engine]:
    # In bfloat16 the first word is nearly a tie, which kernels of two processors decide differently.
    flags = ["--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "256M"]
    yield from started(DEMO_MODEL, demo_cache, *flags)


class Elsewhere:
    """The engine for callers in other event loops, while its own runs."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._endpoint, self._loop = engine.endpoint, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def complete(self, call: Call, on_tokens: OnTokens | None = None) -> Completion:
        answer = self._endpoint.complete(call, on_tokens)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self._loop))


class TestResuming:
    """Greedy and in float32, where equal means equal token by token."""

    def test_every_cut_ends_as_if_uninterrupted(self, tiny: Engine) -> None:
        whole, tokens = tiny.tokens(GREEDY)
        assert len(set(tokens)) > 12, "a model that repeats itself would prove nothing"
        for cut, (resumed, again) in enumerate(tiny.resumed(GREEDY, cuts(tokens)), start=1):
            assert facts(resumed) == facts(whole), cut
            assert again in ([], tokens), cut  # none where the saved tokens were the whole answer

    def test_a_stop_string_across_the_cut_is_found(self, tiny: Engine) -> None:
        free, tokens = tiny.tokens(GREEDY)
        middle = len(free.choices[0].text) // 2
        stop = free.choices[0].text[middle : middle + 9]  # longer than a token: it lies across some cut
        for included in (False, True):
            body = {**GREEDY, "stop": [stop], "include_stop_str_in_output": included}
            whole = tiny.complete(body)
            assert whole.choices[0].finish_reason == "stop"
            assert whole.choices[0].text.endswith(stop) == included
            for cut, (resumed, _) in enumerate(tiny.resumed(body, cuts(tokens)), start=1):
                assert facts(resumed) == facts(whole), cut  # cuts after the stop string, too

    def test_characters_of_several_tokens_survive_the_cut(self, tiny: Engine) -> None:
        prompt = "Repeat: 🦙🧊 日本語"
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 32}
        emoji = engine_tokens(tiny, "🦙🧊🪐")
        bias = {str(token): 100 for token in emoji}
        body |= {"logit_bias": bias}  # nothing but fragments of characters
        whole, tokens = tiny.tokens(body, url=Url.COMPLETIONS)
        assert set(tokens) <= set(emoji)
        for cut, (resumed, _) in enumerate(tiny.resumed(body, cuts(tokens), url=Url.COMPLETIONS), start=1):
            assert facts(resumed) == facts(whole), cut
        answer = {**body, "max_tokens": len(emoji)}
        assert tiny.complete(answer, url=Url.COMPLETIONS, resume_from=emoji).choices[0].text == "🦙🧊🪐"

    def test_the_end_token_and_the_minimum_count_saved_tokens(self, tiny: Engine) -> None:
        _, tokens = tiny.tokens(GREEDY)
        last = next(
            token for number, token in enumerate(tokens) if number > 4 and token not in tokens[:number]
        )
        for minimum in (0, tokens.index(last) + 4):
            body = {**GREEDY, "stop_token_ids": [last], "min_tokens": minimum}
            whole, stopped = tiny.tokens(body)
            assert whole.choices[0].finish_reason == ("length" if minimum else "stop")
            for cut, (resumed, _) in enumerate(tiny.resumed(body, cuts(stopped)), start=1):
                assert facts(resumed) == facts(whole), (minimum, cut)

    def test_an_answer_to_the_end_of_the_context_resumes(self, tiny: Engine) -> None:
        asked = [{"role": "user", "content": "river " * 420}]
        body = {"messages": asked, "temperature": 0, "ignore_eos": True}
        whole, tokens = tiny.tokens(body)
        assert whole.prompt_tokens + whole.completion_tokens == 512
        assert len(tokens) > 40
        for cut, (resumed, _) in enumerate(tiny.resumed(body, cuts(tokens)), start=1):
            assert facts(resumed) == facts(whole), cut

    def test_a_program_answers_a_job_on_it(self, tiny: Engine) -> None:
        alone = tiny.complete(GREEDY).choices[0].text

        async def program() -> list[dict[str, Any]]:
            job = await conserve.open().submit.aio(
                [{"q": "What is the capital of France?"}, {"q": "and of Spain?"}],
                prompt="{{ q }}",
                params={"temperature": 0, "max_tokens": 24},
            )
            engine = conserve.Engine()
            engine._endpoint = Elsewhere(tiny, asyncio.get_running_loop())
            assert (await job.run.aio(engine=engine, progress=False)).succeeded == 2
            return await asyncio.to_thread(list, job.results())

        first, other = tiny.run(program())
        assert first["text"] == alone
        assert other["text"] not in ("", alone)
        assert first["engine"] == tiny.endpoint.identity

    def test_both_processes_are_forked_and_the_worker_computes_on_its_cores(self, tiny: Engine) -> None:
        core, worker = engine_processes()
        assert core.ppid() == worker.ppid() == fork_server.pythons_server()._forkserver_pid
        first, *_ = sorted(os.sched_getaffinity(0))
        assert frozenset({first}) in threads(worker)

    def test_the_start_told_its_steps_and_ended_them(self, tiny: Engine) -> None:
        assert told(engine_log().tail()) == "preparing the model"
        assert tiny.endpoint.doing is None

    def test_tokens_in_flight_are_counted_without_streaming(self, tiny: Engine) -> None:
        async def watch() -> list[InFlight]:
            body = {"messages": FRANCE, "temperature": 0, "ignore_eos": True, "max_tokens": 200}
            call = asyncio.create_task(tiny.endpoint.complete(tiny.call(body)))
            seen = []
            while not call.done():
                await asyncio.sleep(0)
                seen.append(tiny.endpoint.in_flight)
            return [*seen, tiny.endpoint.in_flight, InFlight((await call).prompt_tokens)]

        *seen, after, whole = tiny.run(watch())
        computed = [look.computed for look in seen]
        assert after == InFlight(0, 0)
        assert {look.most for look in seen} == {0, whole.computed + 200}
        assert any(whole.computed < tokens <= whole.computed + 200 for tokens in computed)
        assert all(not tokens or tokens > whole.computed for tokens in computed), "a prompt counts as a whole"

    def test_a_killed_engine_fails_its_calls_and_comes_back(
        self, tiny: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("conserve.engine.vllm.requests.token_watch.LOOK_S", 0.0)

        async def kill_midway() -> list[Any]:
            body = {"messages": FRANCE, "ignore_eos": True, "max_tokens": 400}
            begun = [asyncio.Event() for _ in range(3)]
            calls = [
                asyncio.create_task(
                    tiny.endpoint.complete(tiny.call(body), lambda _, event=event: event.set())
                )
                for event in begun
            ]
            for call, event in zip(calls, begun, strict=True):
                call.add_done_callback(lambda _, event=event: event.set())
            await asyncio.gather(*(event.wait() for event in begun))
            for core in engine_cores():
                core.kill()
            return await asyncio.gather(*calls, return_exceptions=True)

        whole, tokens = tiny.tokens(GREEDY)
        results = tiny.run(kill_midway())
        while any(isinstance(result, Completion) for result in results):  # whole before the kill, under load
            results = tiny.run(kill_midway())
        assert [type(result) for result in results] == [EngineDied] * 3

        async def resume_twice() -> list[Completion]:
            call = tiny.call(GREEDY, resume_from=tokens[:5])
            return await asyncio.gather(
                tiny.endpoint.complete(call), tiny.endpoint.complete(tiny.call(GREEDY))
            )

        for completion in tiny.run(resume_twice()):
            assert facts(completion) == facts(whole)
        assert len(engine_cores()) == 1, "callers that wait share one restart"


def engine_tokens(engine: Engine, text: str) -> list[int]:
    serving = engine.run(engine.endpoint._engine()).serving
    return list(serving.llm.renderer.tokenizer.encode(text, add_special_tokens=False))


class TestAnswers:
    """The demo model, as a user meets it."""

    def test_the_capital_of_france_is_paris(self, demo: Engine) -> None:
        completion = demo.complete(GREEDY)
        assert facts(completion) == ("The capital of France is Paris.", "stop", 37, 8)
        assert completion.model == DEMO_MODEL

    def test_streamed_and_final_answers_are_equal(self, demo: Engine) -> None:
        streamed, tokens = demo.tokens(GREEDY)
        assert facts(streamed) == facts(demo.complete(GREEDY))
        assert len(tokens) == streamed.completion_tokens

    def test_a_json_schema_gives_json(self, demo: Engine) -> None:
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "rivers": {"type": "integer"}},
            "required": ["city", "rivers"],
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}}
        completion = demo.complete({**GREEDY, "response_format": wanted, "max_tokens": 80})
        assert set(json.loads(completion.choices[0].text)) == {"city", "rivers"}

    def test_logprobs_take_the_form_of_their_route(self, demo: Engine) -> None:
        chat = demo.complete({**GREEDY, "logprobs": True, "top_logprobs": 2}).choices[0]
        assert chat.logprobs is not None
        first = chat.logprobs["content"][0]
        assert (first["token"], len(first["top_logprobs"])) == ("The", 2)
        body = {"prompt": "One, two,", "temperature": 0, "max_tokens": 3, "logprobs": 1}
        text = demo.complete(body, url=Url.COMPLETIONS).choices[0]
        assert text.logprobs is not None
        assert "".join(text.logprobs["tokens"]) == text.text
        _, worker = engine_processes()
        compiled = [one.path for one in worker.memory_maps() if "inductor" in one.path]
        assert not compiled, "a compiler held all requests up"

    def test_n_answers_come_in_order(self, demo: Engine) -> None:
        completion = demo.complete({**GREEDY, "temperature": 1, "n": 2, "max_tokens": 4, "ignore_eos": True})
        assert len(completion.choices) == 2
        assert completion.completion_tokens == 8

    def test_several_prompts_are_answered_in_order(self, demo: Engine) -> None:
        prompts = ["Monday, Tuesday,", "One, two,"]
        body = {"prompt": prompts, "max_tokens": 2, "ignore_eos": True, "echo": True}
        completion = demo.complete(body, url=Url.COMPLETIONS)
        starts = [
            choice.text.startswith(prompt) for choice, prompt in zip(completion.choices, prompts, strict=True)
        ]
        assert starts == [True, True]
        assert completion.completion_tokens == 4

    def test_a_repeated_prompt_is_found_in_the_cache(self, demo: Engine) -> None:
        body = {"messages": [{"role": "user", "content": "river " * 300}], "max_tokens": 1}
        assert [demo.complete(body).cached_tokens > 0 for _ in range(2)] == [False, True]

    @pytest.mark.parametrize(
        ("body", "kind"),
        [
            ({"messages": [{"role": "user", "content": "word " * 1100}]}, "too_long"),
            ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "too_long"),
            ({"messages": "hello"}, "invalid_request"),
            ({"messages": []}, "invalid_request"),
            ({"messages": FRANCE, "temperature": -1}, "invalid_request"),
            ({"messages": FRANCE, "response_format": {"type": "json_schema"}}, "invalid_request"),
            ({"messages": FRANCE, "structured_outputs": {"regex": "(("}}, "invalid_request"),
            ({"messages": FRANCE, "thinking_token_budget": 1 << 70}, "invalid_request"),
            (
                {"messages": FRANCE, "tools": [{"type": "function", "function": {"name": "f"}}]},
                "invalid_request",
            ),
            ({"messages": FRANCE, "chat_template": "{{ raise_exception('no') }}"}, "template"),
            ({"messages": FRANCE, "chat_template": "{% if %}"}, "template"),
        ],
    )
    def test_a_request_at_fault_is_rejected(self, demo: Engine, body: dict[str, Any], kind: str) -> None:
        with pytest.raises(RequestRejected) as rejected:
            demo.complete(body)
        assert rejected.value.kind == kind
        assert "\n" not in str(rejected.value)

    def test_an_empty_prompt_is_rejected(self, demo: Engine) -> None:
        with pytest.raises(RequestRejected, match="prompt"):
            demo.complete({"prompt": ""}, url=Url.COMPLETIONS)

    def test_cancelling_withdraws_the_request(self, demo: Engine) -> None:
        async def cancel_midway() -> int:
            body = {"messages": FRANCE, "ignore_eos": True}
            begun = asyncio.Event()
            on_tokens = lambda _: begun.set()  # noqa: E731
            calling = asyncio.create_task(demo.endpoint.complete(demo.call(body), on_tokens))
            await begun.wait()
            calling.cancel()
            assert isinstance(
                (await asyncio.gather(calling, return_exceptions=True))[0], asyncio.CancelledError
            )
            return int((await demo.endpoint._engine()).serving.llm.get_num_unfinished_requests())

        assert demo.run(cancel_midway()) == 0
        assert demo.complete(GREEDY).choices[0].text == "The capital of France is Paris."

    def test_ctrl_c_in_the_terminal_spares_the_engine(self, demo: Engine) -> None:
        (core,) = engine_cores()
        for process in (core, *core.children(recursive=True)):
            process.send_signal(signal.SIGINT)
        # Neither process can answer before it has been interrupted, if it can be.
        assert demo.complete(GREEDY).choices[0].finish_reason == "stop"


def refused(*flags: str, model: str = "/nowhere/model") -> Callable[[Path], None]:
    def start(cache_dir: Path) -> None:
        asyncio.run(EmbeddedEndpoint(model, engine_flags=flags, cache_dir=cache_dir).start())

    return start


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EndpointUnusable, match="there is no model folder /nowhere/model"):
        refused()(tmp_path)
    rows = tmp_path / "rows.csv"
    rows.write_text("q\n1\n")
    with pytest.raises(EndpointUnusable, match=r"rows.csv is a file, and no model; name a model's folder"):
        refused(model=str(rows))(tmp_path)


@pytest.mark.parametrize(
    "flags", [("--no-such-flag",), ("--max-num-seqs", "many"), ("--help",), ("--model=x",)]
)
def test_a_bad_engine_flag_is_one_sentence(
    tiny_llama: Path, tmp_path: Path, flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError) as error:
        refused(*flags, model=str(tiny_llama))(tmp_path)
    assert flags[0].split("=")[0] in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert not fork_server.SERVER.users


# vLLM's half-built client closes its sockets and forgets their context.
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
def test_cancelling_the_start_leaves_no_process(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORK_SERVER)

    async def cancel_start() -> None:
        endpoint = EmbeddedEndpoint(str(tiny_llama), cache_dir=tmp_path)
        starting = asyncio.create_task(endpoint.start())
        while not engine_cores() and not starting.done():
            await asyncio.sleep(0.05)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(cancel_start())
    gc.collect()
    assert fork_server.SERVER.environment is None
    assert processes_left() == []


@pytest.mark.full
class TestForked:
    """Core and worker that are forked off one process that has imported vLLM are like those that are spawned."""

    def run(self, model: Path, folder: Path) -> tuple[Counter[Cores], str]:
        """Start an engine; which cores the threads of its worker are bound to, and text."""

        async def run() -> Any:
            endpoint = EmbeddedEndpoint(str(model), cache_dir=folder)
            await endpoint.start()
            _, worker = engine_processes()
            bound = threads(worker)
            body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
            completion = await endpoint.complete(Call(key="row", url=Url.COMPLETIONS, body=body))
            await endpoint.close()
            return bound, completion.choices[0].text

        return asyncio.run(run())

    def test_threads_and_answers_are_as_if_spawned(
        self, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forked, answer = self.run(tiny_llama, tmp_path)
        fork_server.SERVER.stop()
        monkeypatch.setenv(FORK_SERVER, fork_server.OFF)
        spawned, same = self.run(tiny_llama, tmp_path)
        assert {cores for cores in spawned if len(cores) == 1} == {
            cores for cores in forked if len(cores) == 1
        }
        assert answer == same


def engine_processes() -> list[psutil.Process]:
    """Core and worker."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any(name in cmdline(child) for name in ("EngineCore", "Worker"))]


def threads(process: psutil.Process) -> Counter[Cores]:
    """Number of threads of the process by the cores that they are bound to."""
    return Counter(frozenset(os.sched_getaffinity(thread.id)) for thread in process.threads())

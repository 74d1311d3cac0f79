"""Clients of the Batch API that upload and poll: processor time of a poll, in the API and in a server's front end.

    python -m tests.benchmarks polling
    LIVE_URL=http://127.0.0.1:8000 LIVE_MODEL=smollm2-demo python -m tests.benchmarks polling

With `LIVE_URL`, a co-serving server on a quiet machine, the clients use that server's own files and batches, and
live requests run in three kinds of turns: with the clients, without them, and with the same clients busy at another
server (`elsewhere`), which shows what the processor time of clients on this machine does. P99 of the time to the
first token is compared. Rows of one large batch wait in all turns, and each turn begins after a pause of live
requests, since none run while the clients upload.
"""

import os
import random
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import psutil

from tests.batch_rig import CHAT, lines
from tests.benchmarks.report import REPOSITORY, Figure

CLIENTS = 64
POLLS = 20  # of each client, in each round
ROUNDS = int(os.environ.get("ROUNDS", 5))
RESAMPLES = 2000
LIVE_REQUESTS = 100  # of each turn
QUEUED = 20_000  # rows, which run in all turns
COMMAND = "python -m tests.benchmarks polling"
PORT, FRONT_PORT, OTHER_PORT = 8791, 8792, 8793


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def measure() -> list[Figure]:
    """Processor time of a poll and of an upload; with a live server, the harm to its requests."""
    with tempfile.TemporaryDirectory() as folder:
        figures = [*over_api(Path(folder) / "home"), *through_front(Path(folder))]
    live = os.environ.get("LIVE_URL")
    return [*figures, *harm(live.rstrip("/"))] if live else figures


@cache
def certificates() -> ssl.SSLContext:
    """Certificates for all clients of this process: httpx reads them for each client, in 17 ms of a processor."""
    return httpx.create_ssl_context()


def client_of(base: str, headers: Mapping[str, str] | None = None) -> httpx.Client:
    """A client with connections of its own, which it gives up before a server does after 5 s."""
    return httpx.Client(
        base_url=base,
        timeout=120.0,
        trust_env=False,
        headers=headers,
        verify=certificates(),
        limits=httpx.Limits(keepalive_expiry=3.0),
    )


def over_api(home: Path) -> list[Figure]:
    """Figures of `conserve api` alone."""
    with served(home) as (base, process), ThreadPoolExecutor(CLIENTS) as pool:
        before = cpu_s(process)
        names = list(pool.map(lambda _: uploaded(base), range(CLIENTS)))
        upload_ms = (cpu_s(process) - before) / CLIENTS * 1e3
        await_jobs(base, names)
        idle_s = idle(process)
        poll_ms = [polled(pool, [process], base, names, [idle_s])[0] for _ in range(ROUNDS)]
    return [
        Figure(
            name=f"a poll, of {CLIENTS} clients: processor time of the API",
            unit="ms",
            samples=poll_ms,
            target="<= 1",
            reached=statistics.median(poll_ms) <= 1,
            command=COMMAND,
        ),
        Figure(
            name="an upload and its batch: processor time of the API",
            unit="ms",
            samples=[upload_ms],
            target="",
            reached=True,
            command=COMMAND,
        ),
    ]


def through_front(folder: Path) -> list[Figure]:
    """Figures of polls through a live server's front end: on the short way, and on that past vLLM's layers."""
    found: dict[str, list[list[float]]] = {"short": [], "long": []}
    with fronted(folder) as (base, *processes), ThreadPoolExecutor(CLIENTS) as pool:
        names = list(pool.map(lambda _: uploaded(base), range(CLIENTS)))
        await_jobs(base, names)
        idle_s = [idle(process) for process in processes]
        for _ in range(ROUNDS):
            for way, each in found.items():
                headers = {"Origin": base} if way == "long" else {}
                each.append(polled(pool, processes, base, names, idle_s, headers))
    return [
        Figure(
            name=f"a poll through a server, the {way} way: processor time of {of}",
            unit="ms",
            samples=[one[place] for one in each],
            target="<= 0.5" if way == "short" else "",
            reached=way == "long" or statistics.median(one[place] for one in each) <= 0.5,
            command=COMMAND,
        )
        for way, each in found.items()
        for place, of in enumerate(("the front end", "the API"))
    ]


@contextmanager
def fronted(folder: Path) -> Iterator[tuple[str, psutil.Process, psutil.Process]]:
    """vLLM's server without an engine before `conserve api`: its base URL, and both processes."""
    path, home, base = str(folder / "api.sock"), str(folder / "fronted"), f"http://127.0.0.1:{FRONT_PORT}"
    api = [sys.executable, "-m", "conserve", "--home", home, "api", "--socket", path]
    front = [sys.executable, "-m", "tests.benchmarks.front_end", str(FRONT_PORT), path]
    with (
        ended_with_block(subprocess.Popen(api, cwd=REPOSITORY)) as behind,
        ended_with_block(subprocess.Popen(front, cwd=REPOSITORY)) as before,
    ):
        await_answer(f"{base}/v1/batches", before)
        yield base, psutil.Process(before.pid), psutil.Process(behind.pid)


@contextmanager
def served(home: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`conserve api` over the store at `home`: its base URL, and its process."""
    words = [sys.executable, "-m", "conserve", "--home", str(home), "api", "--port", str(PORT)]
    base = f"http://127.0.0.1:{PORT}"
    with ended_with_block(subprocess.Popen(words, cwd=REPOSITORY)) as running:
        await_answer(f"{base}/health", running)
        yield base, psutil.Process(running.pid)


@contextmanager
def ended_with_block(running: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """End a process by SIGTERM once the block is over."""
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


def await_answer(url: str, running: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers."""
    while running.poll() is None:
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise SystemExit("the server has ended")


def uploaded(base: str, rows: int = 10) -> str:
    """Upload a file of rows, and make a batch of it; returns its id."""
    with client_of(base) as client:
        return uploaded_by(client, rows)


def uploaded_by(client: httpx.Client, rows: int = 10) -> str:
    """Upload a file of rows by this client, and make a batch of it; returns its id."""
    content = lines([f"q{n}" for n in range(rows)])
    file = client.post("/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(client.post("/v1/batches", json=asked).json()["id"])


def await_jobs(base: str, names: Sequence[str]) -> None:
    """Wait until every batch has its job, so that the polls are all that the server does."""
    for name in names:
        while httpx.get(f"{base}/v1/batches/{name}", trust_env=False).json()["status"] == "validating":
            time.sleep(0.05)


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process so far."""
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def idle(process: psutil.Process, seconds: float = 5.0) -> float:
    """Processor time a second without a client."""
    before = cpu_s(process)
    time.sleep(seconds)
    return (cpu_s(process) - before) / seconds


def polled(
    pool: ThreadPoolExecutor,
    processes: Sequence[psutil.Process],
    base: str,
    names: Sequence[str],
    idle_s: Sequence[float],
    headers: Mapping[str, str] | None = None,
) -> list[float]:
    """Processor time of a poll in ms of each process, over `POLLS` of every client on a connection of its own.

    `idle_s`: their processor time a second without a client.
    """

    def poll(name: str) -> None:
        with client_of(base, headers) as client:
            for _ in range(POLLS):
                client.get(f"/v1/batches/{name}").raise_for_status()

    before, began = [cpu_s(process) for process in processes], time.monotonic()
    list(pool.map(poll, names))
    lasted_s = time.monotonic() - began
    spent_s = [
        cpu_s(process) - at - idle * lasted_s
        for process, at, idle in zip(processes, before, idle_s, strict=True)
    ]
    return [each / (POLLS * len(names)) * 1e3 for each in spent_s]


def harm(base: str) -> list[Figure]:
    """P99 of the time to the first token of live requests in three kinds of turns, each over another."""
    found: dict[str, list[list[float]]] = {"with": [], "without": [], "elsewhere": []}
    waiting = uploaded(base, QUEUED)
    await_jobs(base, [waiting])
    first_tokens_s(base)  # the rows have begun
    with elsewhere() as other:
        for _ in range(ROUNDS):
            began = time.monotonic()
            with polling(base):
                paused_s = time.monotonic() - began
                found["with"].append(first_tokens_s(base))
            time.sleep(paused_s)
            found["without"].append(first_tokens_s(base))
            with polling(other):
                found["elsewhere"].append(first_tokens_s(base))
            require_rows(base, waiting)
    return [
        ratio_of(found, base, "with", "without", target=True),
        ratio_of(found, base, "with", "elsewhere"),
        ratio_of(found, base, "elsewhere", "without"),
    ]


def ratio_of(
    found: Mapping[str, list[list[float]]], base: str, one: str, other: str, *, target: bool = False
) -> Figure:
    """The ratio of two kinds of turns, round by round; of all turns together in the note."""
    said = {
        "with": f"with {CLIENTS} clients",
        "without": "without",
        "elsewhere": "with the clients elsewhere",
    }
    ratios = [p99(above) / p99(below) for above, below in zip(found[one], found[other], strict=True)]
    drawn = sorted(
        pooled(found, one, other, random.choices(range(ROUNDS), k=ROUNDS)) for _ in range(RESAMPLES)
    )
    low, high = drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40]
    whole, middle = (pooled(found, one, other, range(ROUNDS), at) for at in (p99, statistics.median))
    return Figure(
        name=f"P99 TTFT of live requests {said[one]} / {said[other]}",
        unit="times",
        samples=ratios,
        target="<= 1.05" if target else "",
        reached=not target or statistics.median(ratios) <= 1.05,
        command=f"LIVE_URL={base} {COMMAND}",
        note=f"of all {ROUNDS} turns together {whole:.2f} (95 % of draws of rounds: {low:.2f} to {high:.2f}); "
        f"their medians {middle:.2f}",
    )


def pooled(
    found: Mapping[str, list[list[float]]],
    one: str,
    other: str,
    rounds: Iterable[int],
    at: Callable[[Sequence[float]], float] = p99,
) -> float:
    """The ratio of the P99s, or of another quantile, over all requests of these rounds."""
    above, below = (at([s for turn in rounds for s in found[kind][turn]]) for kind in (one, other))
    return above / below


def require_rows(base: str, name: str) -> None:
    """Raise if the large batch has ended: turns without rows are not compared with turns with them."""
    if httpx.get(f"{base}/v1/batches/{name}", trust_env=False).json()["status"] != "in_progress":
        raise SystemExit("the rows have ended before the turns; raise QUEUED")


@contextmanager
def elsewhere() -> Iterator[str]:
    """A server of another kind: its base URL."""
    base = f"http://127.0.0.1:{OTHER_PORT}"
    words = [sys.executable, "-m", "tests.benchmarks.elsewhere", str(OTHER_PORT)]
    with ended_with_block(subprocess.Popen(words, cwd=REPOSITORY)) as running:
        await_answer(base, running)
        yield base


@contextmanager
def polling(base: str) -> Iterator[None]:
    """Clients in a process of their own that upload and then poll once a second, until the end of the block."""
    words = [sys.executable, "-m", "tests.benchmarks.polling", base]
    with ended_with_block(subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE)) as clients:
        assert clients.stdout is not None
        clients.stdout.readline()  # all have uploaded
        yield


def poll_for_ever(base: str) -> None:
    """Upload, say so, and poll in as many threads as clients; SIGTERM ends this process."""
    os.nice(19)
    uploads = threading.Barrier(CLIENTS, action=lambda: print("uploaded", flush=True))

    def poll() -> None:
        with client_of(base) as client:  # made before all have uploaded, as clients are that do both
            name = uploaded_by(client)
            uploads.wait()
            time.sleep(random.random())  # clients of different machines do not poll in step
            while True:
                client.get(f"/v1/batches/{name}").raise_for_status()
                time.sleep(1.0)

    for _ in range(CLIENTS):
        threading.Thread(target=poll, daemon=True).start()
    signal.pause()


def first_tokens_s(base: str, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Times to the first token of live requests, one after the other."""
    body = {
        "model": os.environ["LIVE_MODEL"],
        "messages": [{"role": "user", "content": "Count to ten."}],
        "max_tokens": 4,
        "stream": True,
    }
    found = []
    with client_of(base) as client:
        for _ in range(LIVE_REQUESTS):
            began = clock()
            with client.stream("POST", CHAT, json=body) as answer:
                answer.raise_for_status()  # a model of another name is refused in a few ms
                pieces = answer.iter_lines()
                next(pieces)
                found.append(clock() - began)
                list(pieces)
    return found


if __name__ == "__main__":
    poll_for_ever(sys.argv[1])

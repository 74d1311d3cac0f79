"""`conserve doctor`: try the engine, the endpoint, the store and the machine, and name the fix of each fault."""

import asyncio
import os
import platform
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from conserve import __version__
from conserve.cli import doctor_engine, doctor_files, doctor_machine, exits, output
from conserve.cli.context import Context
from conserve.cli.doctor_finding import Finding
from conserve.cli.doctor_machine import Clocks
from conserve.cli.suggestions import at_home
from conserve.config import Settings, settings_files
from conserve.errors import RUN_DOCTOR, ConserveError, StoreFull
from conserve.hosts import server_root, split_login

EXAMPLE = """
conserve doctor
conserve doctor --endpoint http://localhost:8000
conserve doctor --json
"""

Findings = Generator[Finding, None, float | None]


def doctor(
    ctx: typer.Context,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server to try instead of the engine (CONSERVE_ENDPOINT)."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token for it (CONSERVE_API_KEY).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of findings.")] = False,
) -> None:
    """Try the engine, the endpoint, the store and the machine; exits 1 if something needs mending."""
    context: Context = ctx.obj
    findings = []
    for finding in all_findings(context.settings(endpoint=endpoint, api_key=api_key)):
        findings.append(finding)
        if not as_json:
            show(finding)
    if as_json:
        output.data_json([asdict(finding) for finding in findings])
    raise typer.Exit(exits.DONE if all(finding.ok for finding in findings) else exits.FAILED)


def show(finding: Finding) -> None:
    """Print a finding on one line, and its fix below."""
    mark = output.coloured("ok ", "green") if finding.ok else output.coloured("fix", "red")
    output.data(f"{mark} {finding.name:<10} {finding.value}")
    if finding.fix:
        output.data(f"    {'':<10} -> {at_home(finding.fix)}")


def all_findings(settings: Settings) -> Iterator[Finding]:
    """Yield all findings, the slowest last: the engine's library loads meanwhile."""
    began = Clocks.now()
    yield from installation()
    if settings.endpoint or settings.endpoints:
        yield from asyncio.run(endpoints(settings))
        newest_s = yield from surroundings(settings)
    else:
        newest_s = yield from engine_findings(settings)
    yield doctor_machine.clock(began, Clocks.now(), newest_s)


def installation() -> Iterator[Finding]:
    """ConServe's version, and the files that its settings come from."""
    files = settings_files(os.environ, Path.cwd())
    yield Finding("conserve", f"{__version__}, Python {platform.python_version()}, {platform.machine()}")
    yield Finding("settings", ", ".join(str(file) for file in files) or "defaults and CONSERVE_* variables")


def engine_findings(settings: Settings) -> Findings:
    """Engine of this environment, store and machine; the engine's library loads meanwhile in another process."""
    from conserve.engine.vllm.compat.installed import describe_engine
    from conserve.engine.vllm.launching.loading import Loading

    found = describe_engine()
    if found.distribution is None and settings.model is None:  # no model is asked for
        yield doctor_engine.no_engine(found)
        return (yield from surroundings(settings))
    yield from doctor_engine.installed_engine(found)
    if found.problems:  # it cannot load then
        yield from doctor_engine.engine(settings, found)
        return (yield from surroundings(settings))
    output.say(f"loading {found.distribution} {found.version}, which takes some seconds")
    with Loading() as loading:
        yield from doctor_engine.engine(settings, found)
        newest_s = yield from surroundings(settings)
        loaded = loading.outcome()
        yield doctor_engine.library(found, loaded)
        yield from doctor_engine.internals(found, loaded)
    return newest_s


async def endpoints(settings: Settings) -> list[Finding]:
    """Ask each server that is named, or is in a list, for its models, with the key that a harvester sends."""
    from conserve.endpoints.roster import rosters_of

    key = settings.harvest_key or settings.api_key
    urls = [settings.endpoint] if settings.endpoint else []
    lists = (settings.endpoints or "").split()
    try:
        roster = rosters_of([], lists)
        listed = list(await roster.look())
    except ConserveError as error:
        return [Finding("endpoints", str(error), ok=False, fix="correct CONSERVE_ENDPOINTS")]
    found = await asyncio.gather(*(endpoint(url, key) for url in dict.fromkeys([*urls, *listed])))
    if roster.failure is not None:
        fix = "correct CONSERVE_ENDPOINTS, or wait until the list is there"
        return [*found, Finding("endpoints", str(roster.failure), ok=False, fix=fix)]
    if lists and not listed:
        found.append(
            Finding("endpoints", f"no server is in {' '.join(lists)} now; conserve harvest waits for one")
        )
    return found


async def endpoint(address: str, key: str | None) -> Finding:
    """Ask the server for its models, with the key."""
    import httpx

    from conserve.endpoints.discovery import served_models
    from conserve.endpoints.exchange import open_client

    if address.startswith("fake:"):
        return Finding("endpoint", f"{address} answers")
    shown, login = split_login(address)
    url = server_root(shown)
    try:
        async with open_client(url, key, None, login=login) as client:
            return Finding("endpoint", f"{url} serves {', '.join(await served_models(client))}")
    except ConserveError as error:
        refused = getattr(error, "status", None) in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
        key_fix = "set CONSERVE_API_KEY, or CONSERVE_HARVEST_KEY for the harvester alone, to its key"
        if login is not None:
            key_fix = "correct the login in its address, or leave it out for the key of CONSERVE_API_KEY"
        fix = key_fix if refused else "start it, or correct CONSERVE_ENDPOINT or CONSERVE_ENDPOINTS"
        return Finding("endpoint", str(error), ok=False, fix=fix)


def surroundings(settings: Settings) -> Findings:
    """Store and machine; returns the newest time in the store, in s since 1970."""
    newest_s = None
    try:
        stored, newest_s = store(settings)
        yield from stored
        yield doctor_machine.disk(settings.home)
        yield doctor_machine.fsync(settings.home)
    except (ConserveError, OSError) as error:
        cause = error.without(RUN_DOCTOR) if isinstance(error, ConserveError) else str(error)
        yield Finding("store", " ".join(cause.split()), ok=False, fix=store_fix(settings, error))
    yield doctor_machine.open_files()
    return newest_s


def store(settings: Settings) -> tuple[list[Finding], float | None]:
    """Store: its jobs, the time of a commit, its server's clock. The second value is its newest time."""
    from conserve.store.books.queue_name import queue_name
    from conserve.store.books.readings import read_jobs
    from conserve.store.database.store import Store
    from conserve.store.database.trial import server_time_s, write_and_remove

    opened = Store.open(settings)
    try:
        commit_began = time.perf_counter()
        with opened.write() as tx:
            write_and_remove(tx)
        commit_ms = 1e3 * (time.perf_counter() - commit_began)
        with opened.read() as tx:
            server_s, here_s = server_time_s(tx), time.time()
        of_files = [*doctor_files.files(opened), *doctor_files.folders(opened)]
    finally:
        opened.close()
    jobs = read_jobs(settings, now=time.time())
    unfinished = sum(not job.state.final for job in jobs)
    what = (
        f"queue {queue_name(opened.id)}, {output.count(len(jobs), 'job')}, {unfinished} unfinished, "
        f"a commit takes {commit_ms:.3g} ms"
    )
    findings = [Finding("store", f"{settings.place}: {what}"), *of_files]
    if server_s is not None:
        findings.append(doctor_machine.database_clock(server_s - here_s, settings.lease_s))
    times = [
        at for job in jobs for at in (job.submitted_at, job.started_at, job.finished_at) if at is not None
    ]
    return findings, max(times, default=None)


def store_fix(settings: Settings, error: Exception) -> str:
    """Next command for a store that cannot be used."""
    from importlib.util import find_spec

    from conserve.installation import install_line

    if settings.store is None and isinstance(error, StoreFull):
        return doctor_machine.MORE_ROOM
    if settings.store is None:
        return "set CONSERVE_HOME to a folder that can be written"
    if settings.store.startswith("postgres") and find_spec("psycopg") is None:
        return f"run: {install_line('postgres')}"
    return "correct CONSERVE_STORE, or start its database server"

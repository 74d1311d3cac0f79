"""`conserve serve`: vLLM's OpenAI server, which drains the queue in the time that live requests leave."""

import asyncio
import contextlib
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from conserve.cli import exits, output
from conserve.cli.context import Context
from conserve.cli.found_promises import as_tuned, recording
from conserve.cli.options import LogFormat, MetricsHost, MetricsPort, OtlpEndpoint, Share, Utility
from conserve.cli.ports import require_free
from conserve.cli.serve_batches import VLLMS_KEY, batch_api, open_batches, told_of, with_store_keys
from conserve.cli.serve_classes import live_classes, require_keys
from conserve.cli.serve_files import drop_old, log_file, make_home
from conserve.cli.serve_flags import (
    checkpointing,
    drain_s,
    front_of,
    harm_of,
    live_prefixes_of,
    promise,
    receipt_of,
    require_policy,
    require_weights,
    vllms_flags,
)
from conserve.cli.serve_notices import batches_left_out, open_to_all, warnings
from conserve.cli.serve_printed import of_printed, print_command
from conserve.cli.serve_spill import spill, supervised
from conserve.cli.serve_unused import refuse_unused
from conserve.cli.signals import told_to_stop
from conserve.cli.suggestions import again
from conserve.cli.telemetry import begin_logging, harvesters_telemetry, servers_logging
from conserve.config import UNSET, Settings
from conserve.engine.policy.checkpointing import ADAPTIVE, CHECKPOINTS
from conserve.engine.policy.policies import SERVING, traits
from conserve.engine.runtime.api_limits import BODY_BYTES, ApiLimits
from conserve.engine.section import EngineSection
from conserve.engine.server_launch import ServerLaunch
from conserve.errors import SettingsError
from conserve.hosts import url_elsewhere, url_of
from conserve.http_server import CONNECTIONS
from conserve.jobs.harvest.services import announce
from conserve.names import DEFAULT_HARM, OFF
from conserve.variables import ENGINE_LOG, GIVEN, HARVEST_KEY, SERVED

if TYPE_CHECKING:
    from conserve.engine.service import ProcessCommand, Service

EXAMPLE = """
conserve serve smollm2-demo --ttft-slo 1500ms --tbt-slo 150ms
conserve serve Qwen/Qwen2.5-7B-Instruct --ttft-slo 1s --tbt-slo 100ms --max-model-len 8192
conserve submit nightly.parquet --prompt "{{ q }}"
"""


def serve(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [VLLM FLAGS]", help="Local folder, hub id or smollm2-demo; any flag of vllm serve."
        ),
    ] = None,
    ttft_slo: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Live requests get their first token within this, e.g. 1500ms, or p50=300ms,p99=1500ms.",
        ),
    ] = None,
    tbt_slo: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="And no two of their tokens are further apart, e.g. 100ms, or mean=40ms,p99=100ms.",
        ),
    ] = None,
    harm: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Rows add at most about this share to live latencies, e.g. 5%; "
            f"{DEFAULT_HARM:.0%} for a latency without an SLO, or {OFF}.",
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Classes of live traffic with promises of their own, as TOML."),
    ] = None,
    live_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME=PROMISES",
            help="Such a class, e.g. chat=ttft:p99=300ms,tbt:p99=50ms; for each one.",
        ),
    ] = None,
    class_for: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=USE",
            help="Its requests: key:KEYNAME, project:P, model:NAME, or anyone for all that ask for it.",
        ),
    ] = None,
    receipt: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Pause rows at random, for this share of the time with live requests, to measure their harm: 1%, "
            "or off.",
        ),
    ] = None,
    live_prefixes: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="KV memory that rows leave at most to prompts of live requests which may be found again: 50%, or "
            "off.",
        ),
    ] = None,
    push_slo_scale: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=1.0,
            max=10.0,
            help="Largest scale of the promises for rows of --on-late push jobs that would miss their deadline.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help=f"How the two share the engine: {', '.join(SERVING)}, or a class of yours by its path."
        ),
    ] = SERVING[0],
    preemption: Annotated[
        bool, typer.Option(help="Let offline rows leave an iteration when a live request arrives.")
    ] = True,
    kv_checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Which KV blocks of rows are copied to host memory, to go on from after losing the engine's: "
            f"{', '.join(CHECKPOINTS)}, {OFF}, or a class of yours; {ADAPTIVE} where rows give way.",
        ),
    ] = None,
    kv_host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host memory for that, of all engines and workers together; 4GiB by default."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="auto|FILE", help="Latency profile; the one of this engine, or learned at the start."
        ),
    ] = None,
    kv_spill: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where a clean stop leaves the KV of rows in flight for the next start."
        ),
    ] = None,
    record_views: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write what the policy sees and plans, for a bug report; at most 1 GiB."
        ),
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Promise what conserve tune has found for this model.")
    ] = False,
    record_arrivals: Annotated[
        bool,
        typer.Option(help="Keep times and lengths of live requests, without their words, for conserve tune."),
    ] = True,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer token that clients must send (CONSERVE_API_KEY).")
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Answer /metrics without a key.")
    ] = False,
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest body of a request.")
    ] = f"{BODY_BYTES >> 20}MiB",
    max_connections: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most connections at once.")
    ] = CONNECTIONS,
    harvest: Annotated[bool, typer.Option(help="Drain the job queue of this store.")] = True,
    batches: Annotated[
        bool, typer.Option(help="Serve OpenAI's files and batches over this store, too.")
    ] = True,
    max_file: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of an upload.")] = "200MB",
    max_requests: Annotated[int, typer.Option(metavar="N", min=1, help="Most requests of a batch.")] = 50_000,
    utility: Utility = None,
    share: Share = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    otlp_endpoint: OtlpEndpoint = None,
    log_format: LogFormat = None,
    allow_control: Annotated[
        bool,
        typer.Option(
            "--allow-control", help="Let clients change policy, preemption and SLO (conserve bench)."
        ),
    ] = False,
    print_flags: Annotated[
        bool,
        typer.Option(
            "--print-flags",
            help="Print the command of a vllm serve of your own with these flags; serve nothing.",
        ),
    ] = False,
) -> None:
    """Serve a model like vllm serve, and run queued rows whenever live requests leave time.

    Stop it with Ctrl-C or SIGTERM: requests under way are finished, progress of rows is saved.
    """
    words = named_model(model)
    require_policy(policy)
    refuse_unused(ctx, harvest=harvest, batches=batches)
    from conserve.engine.runtime.spill_file import claim
    from conserve.engine.service import Service

    context: Context = ctx.obj
    watched = {"metrics_port": metrics_port, "metrics_host": metrics_host, "otlp_endpoint": otlp_endpoint}
    shared = {"api_key": api_key, "utility": utility, "share": share, "log_format": log_format}
    settings = begin_logging(context.settings(model=words[0], **shared, **watched))
    require_weights(settings)
    settings = keyed(with_store_keys(settings, batches=batches or print_flags))
    front = front_of(max_body, max_file, max_connections, open_metrics=open_metrics)
    leaves = traits(policy).rows_may_leave or allow_control
    section = EngineSection(
        policy=policy,
        ttft_slo_ms=promise("--ttft-slo", ttft_slo),
        tbt_slo_ms=promise("--tbt-slo", tbt_slo),
        harm=harm_of(harm),
        receipt=receipt_of(receipt),
        push_slo_scale=push_slo_scale,
        live_prefixes=live_prefixes_of(live_prefixes),
        profile=profile,
        profiles=str(settings.profiles_folder),
        control=allow_control,
        preemption=None if preemption and leaves else OFF,
        classes=live_classes(classes, live_class or [], class_for or []),
    )
    section = as_tuned(section, settings, words, given=(ttft_slo, tbt_slo, harm)) if tuned else section
    require_keys(section.classes, settings, batches=batches, own_server=print_flags)
    section = recording(section, settings, port, record_views, arrivals=record_arrivals and not print_flags)
    url = url_of(host, port)
    checkpoint = kv_checkpoint or (ADAPTIVE if leaves else OFF)
    kept = checkpointing(vllms_flags(settings, words[1:]), checkpoint, kv_host_memory, kv_spill)
    flags = [*kept, "--host", host, "--port", str(port)]
    if print_flags:
        raise typer.Exit(print_command(settings, section, flags, of_printed(ctx, host, settings)))
    require_free(host, port)
    say_first(host, settings, batches=batches)
    batches = batches and not open_batches(host, settings)
    server = server_command(settings, section, flags, port, front)
    with contextlib.ExitStack() as opened:
        if kv_spill is not None:
            opened.enter_context(claim(kv_spill))
            server = supervised(server)
        beside = opened.enter_context(batch_api(settings, front.file_bytes, max_requests, wanted=batches))
        service = Service(
            told_of(beside, server),
            harvester_command(settings, url) if harvest else None,
            url=url,
            say=output.say,
            drain_s=drain_s(flags),
            before_stop=(lambda: spill(settings, server, url)) if kv_spill is not None else None,
            batch_api=beside,
        )
        raise typer.Exit(asyncio.run(supervise(service, settings, section, url, url_elsewhere(host, port))))


def named_model(words: list[str] | None) -> list[str]:
    """Words of the command line, the model first; raises without one."""
    if not words or words[0].startswith("-"):
        raise SettingsError("name the model first: conserve serve MODEL --ttft-slo 1500ms --tbt-slo 100ms")
    return words


def say_first(host: str, settings: Settings, *, batches: bool) -> None:
    """Say what other machines reach, and what they do not."""
    left_out = [batches_left_out(host)] if batches and open_batches(host, settings) else []
    for notice in (*open_to_all(host, settings), *left_out):
        output.say(notice)


def keyed(settings: Settings) -> Settings:
    """Settings with a harvester's key, which is made for this start unless given; none without an API key."""
    api_key = settings.api_key or os.environ.get(VLLMS_KEY)
    made = settings.harvest_key or secrets.token_urlsafe(32)
    return replace(settings, api_key=api_key or None, harvest_key=made if api_key else None)


def server_command(
    settings: Settings, section: EngineSection, flags: list[str], port: int, front: ApiLimits | None = None
) -> "ProcessCommand":
    """Command of vLLM's server with ConServe's plug-in."""
    from conserve.engine.service import ProcessCommand, python

    log = os.environ.get(ENGINE_LOG)
    launch = ServerLaunch(
        model=settings.engine_model,
        models_folder=str(settings.models_folder),
        section=section,
        limits=front or ApiLimits(),
        flags=flags,
    )
    return ProcessCommand(
        name="server",
        words=python("conserve.engine.vllm.server.process", *launch.words()),
        # Keys go into the environment: every user of the machine can read a command line.
        environment={
            SERVED: "1",
            VLLMS_KEY: settings.api_key or "",
            HARVEST_KEY: settings.harvest_key or "",
            **servers_logging(),
        },
        log=Path(log).expanduser() if log else log_file(settings.home, port),
    )


def harvester_command(settings: Settings, url: str, *more: str) -> "ProcessCommand":
    """Command of `conserve harvest` on this store, which reaches the server beside it without a proxy."""
    from conserve.endpoints.proxies import exempting
    from conserve.engine.service import ProcessCommand, python

    # The server's model and this store, with the place of its files, win over those of variables and files.
    environment = {
        "CONSERVE_MODEL": UNSET,
        "CONSERVE_STORE": settings.store_url,
        "CONSERVE_DATA": settings.data or UNSET,
        GIVEN: again(),
        HARVEST_KEY: settings.harvest_key or "",
        **harvesters_telemetry(settings),
        **exempting(urlsplit(url).hostname or ""),
    }
    what = ("harvest", "--endpoint", url, "--utility", str(settings.utility))
    shared = ("--share", settings.share) if settings.share is not None else ()
    words = ("--home", str(settings.home), *what, *shared, *more)
    return ProcessCommand(name="harvester", words=python("conserve", *words), environment=environment)


async def supervise(
    service: "Service", settings: Settings, section: EngineSection, url: str, elsewhere: str | None
) -> int:
    """Run the service until a signal comes; a second one ends it at once."""
    make_home(settings.home)
    drop_old(settings.home, now=time.time())
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            service.kill()
            os._exit(exits.INTERRUPTED)
        output.say("stopping: live requests are finished, progress is saved (once more to stop at once)")
        stop.set()

    begun = time.monotonic()

    async def on_ready() -> None:
        output.say(
            f"serving {settings.engine_model} at {url} after {output.duration(time.monotonic() - begun)}"
        )
        for warning in await warnings(settings, section, url):
            output.say(warning)

    with told_to_stop(on_signal):
        output.say(
            f"starting {settings.engine_model} at {url}"
            + (f"; its log is {service.log}" if service.log else "")
        )
        with announce(settings, url, elsewhere=elsewhere) as announced:
            async with announced.kept_fresh():
                await service.run(stop, on_ready=on_ready)
    return exits.DONE

"""Metrics page, traces and structured logs of a harvesting command."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from conserve.cli import output
from conserve.config import UNSET, Settings
from conserve.errors import SettingsError
from conserve.variables import LOG_FORMAT

if TYPE_CHECKING:
    from conserve.jobs.harvest.harvester import Harvester
    from conserve.jobs.harvest.observer import Observer

LOGGING_CONFIG = "VLLM_LOGGING_CONFIG_PATH"


def begin_logging(settings: Settings) -> Settings:
    """Use the wanted log format in this process and in those that it starts; returns the settings."""
    output.json_lines = settings.log_format == "json"
    if output.json_lines:
        from conserve import logs

        logs.begin()
        os.environ[LOG_FORMAT] = logs.JSON
    return settings


def servers_logging() -> dict[str, str]:
    """Variables by which vLLM's own lines are JSON too, unless the user configures its loggers."""
    if not output.json_lines or os.environ.get(LOGGING_CONFIG):
        return {}
    from conserve.engine.vllm.launching.environment import JSON_LOGGING

    return {LOGGING_CONFIG: str(JSON_LOGGING)}


def harvesters_telemetry(settings: Settings) -> dict[str, str]:
    """Variables of the harvester beside a server: its metrics page and its traces."""
    port, url = settings.metrics_port, settings.otlp_endpoint
    return {
        "CONSERVE_METRICS_PORT": UNSET if port is None else str(port),
        "CONSERVE_METRICS_HOST": settings.metrics_host,
        "CONSERVE_OTLP_ENDPOINT": url or UNSET,
    }


class Telemetry:
    """Observer for a harvester, and the page that shows its counters."""

    def __init__(self, observer: "Observer | None", show: Callable[["Harvester"], Any] | None) -> None:
        self.observer, self._show = observer, show

    def watch(self, harvester: "Harvester") -> None:
        """Show this harvester's counters on the metrics page."""
        if self._show is not None:
            self._show(harvester)


@contextmanager
def telemetry(settings: Settings, command: str) -> Iterator[Telemetry]:
    """Metrics and traces as the settings want them; nothing is imported for what they do not."""
    found: list[Observer] = []
    show = None
    with ExitStack() as opened:
        if settings.metrics_port is not None:
            observer, show = opened.enter_context(metrics_page(settings, command, settings.metrics_port))
            found.append(observer)
        if (tracer := traces(settings)) is not None:
            opened.callback(tracer.close)
            found.append(tracer)
        yield Telemetry(together(found), show)


def together(observers: list["Observer"]) -> "Observer | None":
    """Several observers as one, whose errors cost no row; None for none."""
    if not observers:
        return None
    from conserve.jobs.harvest.observer import Observers

    return Observers(observers)


@contextmanager
def metrics_page(
    settings: Settings, command: str, port: int
) -> Iterator[tuple["Observer", Callable[["Harvester"], Any]]]:
    """Serve the page; yields the harvester's observer and a function that shows its counters."""
    from conserve.jobs.telemetry.metrics import HarvesterCollector, HarvestMetrics
    from conserve.jobs.telemetry.queue_metrics import QueueCollector, StoreLook
    from conserve.metrics_page import new_registry, serve_page

    registry = new_registry(command, [QueueCollector(StoreLook(settings))])
    try:
        page = serve_page(registry, settings.metrics_host, port)
    except OSError as error:
        raise SettingsError(
            f"cannot listen at {settings.metrics_host}:{port} ({error}); give another --metrics-port"
        ) from error
    output.say(f"metrics at {page.url}")
    try:
        yield HarvestMetrics(registry), lambda harvester: registry.register(HarvesterCollector(harvester))
    finally:
        page.close()


def traces(settings: Settings) -> Any:
    """Observer that sends a trace of each row; None without a collector to send to."""
    from conserve.jobs.telemetry.otlp import is_wanted

    if not is_wanted(settings, os.environ):
        return None
    from conserve.jobs.telemetry.otlp import open_tracer

    return open_tracer(settings, os.environ, say=output.say)

"""Traces on request: where they go, by the settings and OpenTelemetry's own variables."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from conserve.config import Settings
from conserve.errors import SettingsError
from conserve.installation import install_line

if TYPE_CHECKING:
    from conserve.jobs.telemetry.tracing import RowTracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORTER, DISABLED, SERVICE = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"
TRACES = "/v1/traces"
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def is_wanted(settings: Settings, environ: Mapping[str, str]) -> bool:
    """True if a collector is named. A variable names it too, unless OpenTelemetry is switched off beside it."""
    if settings.otlp_endpoint is not None:
        return True
    off = environ.get(DISABLED, "").lower() == "true" or environ.get(EXPORTER) == "none"
    return not off and any(environ.get(name) for name in ENDPOINTS)


def traces_url(base: str) -> str:
    """Address that spans are sent to: a collector's, with the path of traces unless it is there."""
    return base if TRACES in base else f"{base.rstrip('/')}{TRACES}"


def open_tracer(
    settings: Settings, environ: Mapping[str, str], *, say: Callable[[str], None]
) -> "RowTracer | None":
    """Tracer of rows; without its packages an error if a flag asks for it, a sentence if a variable does."""
    if not installed():
        missing = f"traces need OpenTelemetry's packages; run: {install_line('otel')}"
        if settings.otlp_endpoint is not None:
            raise SettingsError(missing)
        say(f"no traces are sent: {missing}")
        return None
    from conserve.jobs.telemetry.tracing import RowTracer, exporting

    url = traces_url(settings.otlp_endpoint) if settings.otlp_endpoint is not None else None
    return RowTracer(exporting(url, service=environ.get(SERVICE)))


def installed() -> bool:
    """True if the packages of the extra `otel` are there."""
    try:
        return all(map(find_spec, PACKAGES))
    except ModuleNotFoundError:  # of a package around them
        return False

"""The Grafana dashboard, deploy/grafana/conserve.json: harm first, then harvest, backlog and forecast."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${source}"}
HERE = 'job=~"$job", instance=~"$instance"'  # the dashboard's choice of servers
OURS = '{__name__=~"conserve_.+"}'  # series with the labels to choose from
OURS_OF_JOB = '{__name__=~"conserve_.+", job=~"$job"}'
QUEUE, LEGEND = "namespace, queue", "{{namespace}} {{queue}}"  # as the alerts of the backlog
COLUMNS = 24
HEIGHT = 8
RED, ORANGE, GREEN = "red", "orange", "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: what it shows, and PromQL by legend; `HERE` stands for §."""

    title: str
    says: str
    queries: dict[str, str]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    steps: tuple[tuple[float | None, str], ...] = ()
    """Colours from a value on, the first from None."""
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A heading and its panels."""

    title: str
    panels: tuple[Panel, ...]


ROWS = (
    Row(
        title="Live requests: are they harmed?",
        panels=(
            Panel(
                title="SLO kept",
                says="Share of the TTFTs of the last 60 s, or of the TBTs if that is smaller. The plan is 99 %.",
                queries={"{{instance}} {{class}}": "min by (instance, class) (conserve_slo_attainment{§})"},
                unit="percentunit",
                kind="stat",
                width=6,
                steps=((None, RED), (0.9, ORANGE), (0.98, GREEN)),
            ),
            Panel(
                title="Latency seen, of what is promised",
                says="Each promised quantile or mean of the last 60 s. Above 100 % the promise is broken.",
                queries={
                    "{{instance}} {{class}} {{latency}} {{promise}}": (
                        "conserve_promise_seen_seconds{§} / conserve_promised_seconds{§}"
                    )
                },
                unit="percentunit",
                width=9,
                steps=((None, GREEN), (1, RED)),
            ),
            Panel(
                title="Harm: live latency with rows over without",
                says="The servers' receipts: the estimate, and the low and high end of its interval of 95 %.",
                queries={
                    "{{instance}} {{latency}} {{quantile}} {{bound}}": "conserve_harm_ratio{§}",
                },
                unit="none",
                width=9,
                steps=((None, GREEN), (1.1, ORANGE)),
            ),
            Panel(
                title="Live requests",
                says="Live requests that got their first token.",
                queries={
                    "{{instance}} {{class}}": (
                        "sum by (instance, class) (rate(conserve_online_requests_total{§}[$__rate_interval]))"
                    )
                },
                unit="reqps",
            ),
            Panel(
                title="Live latency by class",
                says="P50 and P99 of the last 60 s, on servers with classes of live traffic.",
                queries={
                    "{{instance}} {{class}} {{latency}} {{quantile}}": "conserve_live_latency_seconds{§}"
                },
                unit="s",
            ),
            Panel(
                title="Iterations longer than planned",
                says="The latency model expects 1 %.",
                queries={
                    "{{instance}}": (
                        "rate(conserve_overruns_total{§}[$__rate_interval])"
                        " / rate(conserve_planned_iterations_total{§}[$__rate_interval])"
                    )
                },
                unit="percentunit",
                steps=((None, GREEN), (0.05, RED)),
            ),
        ),
    ),
    Row(
        title="Harvest: what do queued rows get?",
        panels=(
            Panel(
                title="Offline tokens",
                says="Tokens computed for queued rows, each counted once.",
                queries={
                    "{{instance}}": (
                        "sum by (instance) (rate(conserve_offline_tokens_total{§}[$__rate_interval]))"
                    )
                },
                unit="suffix: tokens/s",
                stacked=True,
            ),
            Panel(
                title="Pushed for deadlines",
                says="Those beyond the usual limit, of late jobs with --on-late push.",
                queries={
                    "{{instance}}": (
                        "sum by (instance) (rate(conserve_pushed_tokens_total{§}[$__rate_interval]))"
                    )
                },
                unit="suffix: tokens/s",
                width=4,
            ),
            Panel(
                title="Engine busy",
                says="Share of the time that the engine spends in iterations.",
                queries={"{{instance}}": "rate(conserve_busy_seconds_total{§}[$__rate_interval])"},
                unit="percentunit",
                width=6,
            ),
            Panel(
                title="Rows leave for live requests",
                says="Iterations that rows left, and iterations that all rows left.",
                queries={
                    "{{instance}} left": "rate(conserve_iterations_left_total{§}[$__rate_interval])",
                    "{{instance}} abandoned": "rate(conserve_abandoned_iterations_total{§}[$__rate_interval])",
                },
                unit="ops",
                width=6,
            ),
            Panel(
                title="Offline computing thrown away",
                says="The budget is 1.5 % unless a TTFT is at stake.",
                queries={
                    "{{instance}}": (
                        "rate(conserve_tokens_wasted_total{§}[$__rate_interval])"
                        " / rate(conserve_offline_tokens_total{§}[$__rate_interval])"
                    )
                },
                unit="percentunit",
                steps=((None, GREEN), (0.05, ORANGE)),
            ),
            Panel(
                title="Time until rows have left",
                says="From the decision until the scheduler has control: P50 and P99 of the last thousand times.",
                queries={"{{instance}} {{quantile}}": "conserve_leave_reaction_seconds{§}"},
                unit="s",
            ),
            Panel(
                title="KV of rows that lost the engine's memory",
                says="Tokens whose KV was copied to host memory, came back, or was computed again.",
                queries={
                    f"{{{{instance}}}} {what}": f"rate(conserve_kv_tokens_{what}_total{{§}}[$__rate_interval])"
                    for what in ("saved", "restored", "recomputed")
                },
                unit="suffix: tokens/s",
            ),
        ),
    ),
    Row(
        title="Rows: what do harvesters get done?",
        panels=(
            Panel(
                title="Rows done",
                says="Rows whose outcome is durable. Over stock vLLM this is the harvest.",
                queries={
                    "{{instance}} {{outcome}}": (
                        "sum by (instance, outcome) (rate(conserve_rows_total{§}[$__rate_interval]))"
                    )
                },
                unit="suffix: rows/s",
                width=7,
            ),
            Panel(
                title="Rows at the servers",
                says="Rows that are being answered, and how many keep the servers busy.",
                queries={
                    "{{instance}}": "conserve_rows_in_flight{§}",
                    "{{instance}} most": "conserve_rows_in_flight_most{§}",
                },
                width=6,
            ),
            Panel(
                title="Attempts without an answer",
                says="By the kind of error. Most are tried again.",
                queries={
                    "{{instance}} {{error}}": (
                        "sum by (instance, error) (rate(conserve_attempt_errors_total{§}[$__rate_interval]))"
                    )
                },
                unit="ops",
                width=6,
            ),
            Panel(
                title="Harvesters that wait",
                says="Kept from their rows by an outage, a backoff or another process; and outages of an hour.",
                queries={
                    "wait": "sum(conserve_harvester_waiting{§})",
                    "outages of the {{of}}": "sum by (of) (increase(conserve_outages_total{§}[1h]))",
                },
                kind="stat",
                width=5,
                steps=((None, GREEN), (1, ORANGE)),
            ),
        ),
    ),
    Row(
        title="Backlog and forecast: is the work done in time?",
        panels=(
            Panel(
                title="Deadline load",
                says="Largest share, over all deadlines, of the time until it that the work until then takes.",
                queries={LEGEND: f"max by ({QUEUE}) (conserve_deadline_load)"},
                unit="percentunit",
                kind="stat",
                width=6,
                steps=((None, GREEN), (0.8, ORANGE), (1, RED)),
            ),
            Panel(
                title="Work that waits",
                says="Predicted time at the usual rate, by when it is due.",
                queries={
                    f"{LEGEND} due within {{{{due_within}}}}": (
                        f"max by ({QUEUE}, due_within) (conserve_backlog_seconds)"
                    )
                },
                unit="s",
                width=12,
            ),
            Panel(
                title="Jobs with rows to run",
                says="Of each queue.",
                queries={LEGEND: f"max by ({QUEUE}) (conserve_backlog_jobs)"},
                kind="stat",
                width=6,
            ),
        ),
    ),
)


def page() -> str:
    """The dashboard as JSON, one panel's field a line."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's model."""
    return {
        "uid": "conserve",
        "title": "ConServe",
        "description": "What queued rows cost live requests, what they get, and when they are done.",
        "tags": ["conserve"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source(), choice("job", OURS), choice("instance", OURS_OF_JOB)]},
        "panels": list(placed()),
    }


def source() -> dict[str, Any]:
    """The variable that chooses the data source."""
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def choice(label: str, series: str) -> dict[str, Any]:
    """A variable with the values of a label; all of them at first."""
    query = f"label_values({series}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": label},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def placed() -> Iterator[dict[str, Any]]:
    """Rows and panels with their places, left to right, in lines of 24 columns."""
    number, y = 0, 0
    for row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            **at(0, y, COLUMNS, 1),
        }
        x, y = 0, y + 1
        for panel in row.panels:
            number += 1
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            yield {"id": number, **drawn(panel), **at(x, y, panel.width, HEIGHT)}
            x += panel.width
        y += HEIGHT


def at(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    """A place on the dashboard's grid."""
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def drawn(panel: Panel) -> dict[str, Any]:
    """A panel without its place."""
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "targets": [target(*each, number) for number, each in enumerate(panel.queries.items())],
        "fieldConfig": {"defaults": look(panel), "overrides": []},
        "options": options(panel),
    }


def target(legend: str, query: str, number: int) -> dict[str, Any]:
    """One query of a panel."""
    return {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": query.replace("§", HERE),
        "legendFormat": legend,
    }


def look(panel: Panel) -> dict[str, Any]:
    """Unit, colours and lines of a panel."""
    steps = [{"color": colour, "value": value} for value, colour in panel.steps or ((None, GREEN),)]
    found: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
    }
    if panel.kind == "timeseries":
        found["custom"] = {
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
        }
    return found


def options(panel: Panel) -> dict[str, Any]:
    """Legend and tooltip of a panel."""
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "area"}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}

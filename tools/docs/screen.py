"""The picture of `conserve top` in the documentation, drawn from made-up figures by the code of the screen."""

import io
import re
from datetime import datetime

from rich.console import Console
from rich.terminal_theme import MONOKAI

from conserve.api.overview import Latency, Overview, ServerSeen
from conserve.cli.top_frame import HEIGHT, WIDTH, ScreenState, frame
from conserve.jobs.deadlines.forecast import Forecast
from conserve.store.books.readings import JobReading
from conserve.store.books.states import JobState

MINUTE_S, HOUR_S = 60.0, 3600.0
FONTS = re.compile(r"\s*@font-face \{.*?\}\n", re.DOTALL)  # of another site, which no picture may load
AT = datetime(2026, 11, 23, 14, 3, 22).timestamp()  # in local time, as the screen shows it


def job(name: str, state: JobState, rows: int, done: int, *, failed: int = 0, running: int = 0) -> JobReading:
    """A job with so many rows done, of which some failed."""
    return JobReading(
        id=name,
        state=state,
        error=None,
        priority=0,
        submitted_at=AT - 5 * HOUR_S,
        started_at=AT - 4 * HOUR_S,
        finished_at=AT - HOUR_S if state.final else None,
        rows=rows,
        waiting=rows - done - running,
        running=running,
        succeeded=done - failed,
        failed=failed,
        retries=0,
        prompt_tokens=400 * done,
        completion_tokens=90 * done,
        cached_tokens=120 * done,
        resumed_tokens=0,
        row_order="prefix",
    )


def ahead(half_min: float, most_min: float, in_time: float | None = None) -> Forecast:
    """A forecast, in minutes from now."""
    return Forecast(done_50=AT + MINUTE_S * half_min, done_90=AT + MINUTE_S * most_min, in_time=in_time)


WAVE = (820, 1040, 1260, 1380, 1420, 1210, 900, 640, 520, 610, 880, 1150, 1340, 1460, 1500, 1480)
OVERVIEW = Overview(
    at=AT,
    store="/srv/conserve/store",
    jobs=(
        job("gsm8k-z3gx", JobState.COMPLETED, 200, 200, failed=2),
        job("catalog-9m4t", JobState.PAUSED, 48_000, 31_200),
        job("reviews-k3f9", JobState.QUEUED, 1_250_000, 0),
        job("news-2b7d", JobState.RUNNING, 60_000, 15_360, failed=7, running=96),
    ),
    servers=(
        ServerSeen(
            url="http://gpu1:8000",
            policy="conserve",
            ttft_ms=Latency(412.0, 1500.0),
            tbt_ms=Latency(104.0, 100.0),
            attainment=0.98,
            tokens_per_s=640.0,
            course=WAVE,
            iterations_left=214,
            tokens_redone=1_930,
            tokens_restored=48_200,
            tokens_recomputed=310,
        ),
        ServerSeen(
            url="http://gpu2:8000",
            policy="conserve",
            ttft_ms=Latency(188.0, 1500.0),
            tbt_ms=Latency(71.0, 100.0),
            attainment=1.0,
            tokens_per_s=840.0,
            course=WAVE[::-1],
            iterations_left=87,
            tokens_redone=402,
            tokens_restored=9_100,
        ),
        ServerSeen(url="http://gpu3:8000", error="does not answer (starting, or starting again)"),
    ),
    forecasts={"news-2b7d": ahead(62, 95, 0.81), "reviews-k3f9": ahead(7 * 60, 9 * 60 + 20)},
    tokens_per_s=1480.0,
    course=WAVE * 3,
    quarters=(0, 0, 0, 120, 640, 900, 1100, 1300, 1420, 1480, 1200, 900, *WAVE[:12]),
)


def picture() -> str:
    """The screen at 80x24 as SVG."""
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    for line in frame(OVERVIEW, ScreenState(job="news-2b7d")):
        console.print(line, no_wrap=True, overflow="crop", crop=True, highlight=False)
    drawn = console.export_svg(title="conserve top", theme=MONOKAI, unique_id="top")
    return FONTS.sub("", drawn).replace("Fira Code, monospace", "ui-monospace, monospace")

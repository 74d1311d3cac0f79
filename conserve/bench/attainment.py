"""Shares of live requests and of token gaps within their limits. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from conserve.bench.answers import Floats, LoadAnswer, RequestEnd, tbts_ms, ttfts_ms

SCALES = (1.0, 1.25, 1.5, 2.0)


class LatencyLimits(NamedTuple):
    """Limits of TTFT and TBT, in ms: an SLO, or a reference."""

    ttft_ms: float
    tbt_ms: float


class Attainment(NamedTuple):
    """Shares of requests and of token gaps within their limits, and the smaller of the two."""

    ttft: float | None
    tbt: float | None
    attainment: float | None


def attainments(answers: Sequence[LoadAnswer], reference: LatencyLimits | None) -> dict[str, Attainment]:
    """Attainment by scale; empty without a reference."""
    return {str(scale): attainment(answers, reference, scale) for scale in SCALES} if reference else {}


def attainment(answers: Sequence[LoadAnswer], reference: LatencyLimits, scale: float) -> Attainment:
    """Shares within `scale` times the reference; a failed request misses once in each."""
    failed = sum(answer.status is not RequestEnd.OK for answer in answers)
    complete = [answer for answer in answers if answer.status is RequestEnd.OK]
    ttft = _share_within(ttfts_ms(complete), scale * reference.ttft_ms, failed)
    tbt = _share_within(tbts_ms(complete), scale * reference.tbt_ms, failed)
    known = [share for share in (ttft, tbt) if share is not None]
    return Attainment(ttft, tbt, min(known, default=None))


def _share_within(values_ms: Floats, limit_ms: float, missed: int) -> float | None:
    number = len(values_ms) + missed
    return int(np.count_nonzero(values_ms <= limit_ms)) / number if number else None

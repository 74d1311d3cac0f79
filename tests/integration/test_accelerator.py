"""The simulated accelerator: host and device have times of their own, and iterations overlap or not."""

from __future__ import annotations

import pytest

from tests.warned import OF_VLLM

pytestmark = [
    pytest.mark.engine,
    *OF_VLLM,
]

RATE = (
    0.4  # live requests/s; at 1.0 the engine that does not overlap has gaps beyond the promise, and no rows
)


def test_live_requests_do_not_see_the_hosts_work_where_iterations_are_scheduled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.benchmarks import accelerator

    monkeypatch.setattr(accelerator, "BLOCK_S", 8.0)
    monkeypatch.setattr(accelerator, "WARM_S", 1.0)
    monkeypatch.setattr(accelerator, "WINDOW", 60)
    alone = accelerator.play(accelerator.ALONE, RATE, {}).quantiles()
    decode_ms = accelerator.H200_LLAMA_8B.coefficients["constant"]
    assert decode_ms < alone["P50 TBT"] < 1.1 * decode_ms
    promise = {"ttft_slo_ms": 1.25 * alone["P99 TTFT"], "tbt_slo_ms": 1.25 * alone["P50 TBT"]}
    ahead = accelerator.play(accelerator.OURS, RATE, promise)
    apart = accelerator.play(accelerator.OURS, RATE, promise, ahead=False)
    host_ms = 2e3 * accelerator.HOST_S
    assert apart.quantiles()["P50 TBT"] > alone["P50 TBT"] + 0.9 * host_ms
    assert ahead.quantiles()["P50 TBT"] <= 1.02 * promise["tbt_slo_ms"]
    assert ahead.quantiles()["P99 TTFT"] <= 1.05 * promise["ttft_slo_ms"]
    assert ahead.rows_per_s > 1.4 * apart.rows_per_s > 0

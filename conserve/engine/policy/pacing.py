"""How many tokens an iteration may compute so that it stays within a time."""

from collections.abc import Iterable

from conserve.profiles.batch import Batch, Slice
from conserve.profiles.model import LatencyModel


def token_budget(model: LatencyModel, wanted: Iterable[Slice], tbt_ms: float) -> int:
    """Tokens of the first requests in `wanted` that together take at most `tbt_ms`, at least one.

    The requests are served in order, and the first that has to be cut short ends the batch: conserve-2026
    Algorithm 1. At least one token, since an engine that computes nothing never gets any further.
    """
    batch = Batch()
    for request in wanted:
        tokens = model.can_schedule(batch, request, tbt_ms)
        if tokens:
            batch.add(tokens, request.context, request.decode)
        if tokens < request.tokens:
            break
    return max(1, batch.tokens)

"""ConServe's latency model (conserve-2026 section 4.2), in the paper's form and with the terms that it lacks.

The paper gives, for one chunk of P tokens after C tokens of context,

    Latency(P, C) = k1 P + k2 P (P + C) + k3 P + k4 (P + C) + k5

A batch holds many requests. Attention never crosses from one request to another, so the product is taken per
request and then summed: sum of p (p + c). Applied to totals, P (P + C) would charge every request for the
context of all others: 64 decode steps at 1,000 tokens of context are 64 * 1,001 products, not 64 * 64,064.
The other terms are linear, so there the sums are the totals.

k1 (computation) and k3 (communication) multiply the same P, so one profile shows only their sum, here
`compute`; `parallelism.separate` splits it if there are profiles at several degrees of parallelism.
"""

from typing import Any, ClassVar

from conserve.profiles.batch import Batch
from conserve.profiles.model import LinearModel, Parabola


class PaperModel(LinearModel):
    """The paper's model with its five coefficients, k1 and k3 as one (conserve-2026 section 4.2)."""

    name = "conserve-paper"
    terms: ClassVar = {
        "compute": "k1 + k3, per token: projections, feed-forward layers and collectives",
        "attention": "k2, per p (p + c): each new token with each earlier one of its request",
        "memory": "k4, per token of p + c: reading and writing the KV cache",
        "constant": "k5, per iteration: scheduling, launches, the weights' way through the memory",
    }

    @staticmethod
    def columns(sums: Any) -> tuple[Any, ...]:
        return (sums.tokens, sums.square + sums.product, sums.tokens + sums.context, 1)

    def _with(self, batch: Batch, context: int) -> Parabola:
        k = self.coefficients
        return Parabola(
            k["attention"],
            k["compute"] + k["attention"] * context + k["memory"],
            self.predict(batch) + k["memory"] * context,
        )


class ConServeModel(LinearModel):
    """The paper's form with five terms that its residuals call for; each coefficient may be zero.

    - `causal` and `attention` in place of k2: a chunk attends to all of its context but, with a causal mask,
      only to half of itself, and kernels round the diagonal up to their tiles.
    - `request`: block tables, input preparation and sampling cost the same for one token as for a thousand.
    - `prefill`: the further cost of starting one more chunk.
    - `reread`: a chunk reads its context once for every tile of its queries, a decode step only once.
    - `several`: a lone token runs through kernels for vectors; with a second one all products are of matrices.
    """

    name = "conserve"
    terms: ClassVar = {
        "compute": "k1 + k3, per token",
        "causal": "k2 within a chunk, per p^2",
        "attention": "k2 with its context, per p c",
        "memory": "k4, per token of p + c",
        "request": "per request in the batch",
        "prefill": "per prefill chunk in the batch",
        "reread": "per context token of a prefill chunk, beyond k4",
        "constant": "k5, per iteration",
        "several": "per iteration of more than one token",
    }
    added: ClassVar = frozenset({"several"})

    @staticmethod
    def columns(sums: Any) -> tuple[Any, ...]:
        return (
            sums.tokens,
            sums.square,
            sums.product,
            sums.tokens + sums.context,
            sums.requests,
            sums.prefills,
            sums.prefill_context,
            1,
            sums.tokens > 1,
        )

    @classmethod
    def untold(cls, sums: Any) -> frozenset[str]:
        """`several` where no batch has one token.

        `constant` then has the time of both: halves of it would foretell half of the time of a lone token.
        """
        return frozenset() if (sums.tokens <= 1).any() else frozenset({"several"})

    def _with(self, batch: Batch, context: int) -> Parabola:
        k = self.coefficients
        return Parabola(
            k["causal"],
            k["compute"] + k["attention"] * context + k["memory"],
            self.predict(batch)
            + (k["memory"] + k["reread"]) * context
            + k["request"]
            + k["prefill"]
            + k["several"] * (batch.tokens <= 1),
        )

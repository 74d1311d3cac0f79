"""HyGen's latency predictor (hygen section 4.2): linear regression on S_p, S_d, S_p^2, S_d^2, N_p and N_d."""

from typing import Any, ClassVar

from conserve.profiles.batch import Batch
from conserve.profiles.model import LinearModel, Parabola


class HyGenModel(LinearModel):
    """Totals of the two phases, their squares, and the numbers of requests (hygen section 4.2).

    "Prefill and decode tokens" are read as: S_p prompt tokens computed in this iteration, S_d tokens that the
    decode steps attend to. (If S_d were the tokens that they compute, it would equal N_d.) The paper's plain
    least squares is fitted without negative coefficients here, so that its predictions are monotone too. The model
    does not see the context of a prefill chunk, which is the point of ConServe's model.
    """

    name = "hygen"
    terms: ClassVar = {
        "prefill_tokens": "S_p, per prompt token computed",
        "decode_tokens": "S_d, per token that a decode step attends to",
        "prefill_square": "S_p^2",
        "decode_square": "S_d^2",
        "prefills": "N_p, per request in prefill",
        "decodes": "N_d, per request in decode",
        "constant": "per iteration",
    }

    @staticmethod
    def columns(sums: Any) -> tuple[Any, ...]:
        decodes = sums.requests - sums.prefills
        decode_tokens = sums.tokens - sums.prefill_tokens + sums.context - sums.prefill_context
        return (
            sums.prefill_tokens,
            decode_tokens,
            sums.prefill_tokens * sums.prefill_tokens,
            decode_tokens * decode_tokens,
            sums.prefills,
            decodes,
            1,
        )

    def _with(self, batch: Batch, context: int) -> Parabola:
        k = self.coefficients
        return Parabola(
            k["prefill_square"],
            k["prefill_tokens"] + 2 * k["prefill_square"] * batch.prefill_tokens,
            self.predict(batch) + k["prefills"],
        )

"""Time that the plug-in's scheduling takes of an iteration, beyond vLLM's own.

Stock vLLM would be faster by this much, so a harm to live requests counts it as time that rows add (docs/adr/0015).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Self

NEWEST = 32  # iterations; one in 8 has a look at the whole engine, and is no median
EVERY = 8  # iterations between two medians


class OwnTime:
    """Time in our code of the newest iterations with live requests, on the thread of vLLM's engine core."""

    def __init__(self, *, hidden: bool = False, apart: bool = True) -> None:
        """`hidden`: iterations always overlap. `apart`: the model runs in other processes than the engine core."""
        self.ms = 0.0  # median; 0 until `EVERY` iterations have ended
        self._hidden, self._apart = hidden, apart
        self._newest: deque[float] = deque(maxlen=NEWEST)  # seconds
        self._spent_s = self._since = 0.0
        self._until_median = EVERY

    @classmethod
    def of(cls, parallel: Any) -> Self:
        """For an engine with this `ParallelConfig` of vLLM's."""
        return cls(
            hidden=parallel.pipeline_parallel_size > 1, apart=parallel.distributed_executor_backend != "uni"
        )

    def begin(self) -> None:
        """Note that our code runs from here on."""
        self._since = time.monotonic()

    def pause(self, *, launched: bool = False) -> None:
        """Note that our code has ended for now; `launched`: the iteration had been handed to its workers before.

        Where these are apart, they computed meanwhile.
        """
        if not (launched and self._apart):
            self._spent_s += time.monotonic() - self._since

    def of_vllm(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's code, whose time is not ours."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.pause()
            try:
                return call(*args, **kwargs)
            finally:
                self.begin()

        return timed

    def end(self, *, counts: bool) -> None:
        """Note that the iteration is over; `counts`: live requests were in it, and waited for its planning."""
        self.pause()
        spent_s, self._spent_s = self._spent_s, 0.0
        if not counts or self._hidden:
            return
        self._newest.append(spent_s)
        self._until_median -= 1
        if not self._until_median:
            self.ms, self._until_median = median(self._newest) * 1e3, EVERY

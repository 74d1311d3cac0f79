"""Model that answers a run's jobs: the one that a flag or setting names, else the one they are bound to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from conserve.config import Settings, model_name
from conserve.store.books.readings import JobReading


class Binding(NamedTuple):
    """Flags about the model: `named` if one was given, `rebind` if jobs may change theirs."""

    named: bool = False
    rebind: bool = False

    def settled(self, settings: Settings, jobs: Sequence[JobReading]) -> Settings:
        """Settings with the model that all these jobs are bound to, unless a flag or setting names one.

        Raises `JobRefused` where the embedded engine could answer none of them, before it is started.
        """
        bound = {job.model for job in jobs}
        wanted = bound.pop() if len(bound) == 1 else None
        if wanted is None or self.rebind:
            return settings
        if not self.named and settings.model is None:
            return replace(settings, model=wanted)
        if settings.endpoint is None and model_name(settings.engine_model) != wanted:
            from conserve.jobs.harvest.bound import bound_elsewhere

            raise bound_elsewhere(jobs[0].id, wanted, settings.engine_model)
        return settings

"""Jobs of a run: queued under keys, found again by their tags, and answered target by target."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from conserve.api.engines import Engine
from conserve.api.handing import Source
from conserve.api.job import Job
from conserve.api.portal import portal
from conserve.api.runs import RunArguments, drained_together
from conserve.api.store import Store
from conserve.config import UNSET, Settings
from conserve.errors import EndpointUnusable, JobNotFound, JobRefused
from conserve.evals.plan import ModelTarget, SuitePlan
from conserve.evals.records import LiveLatencies
from conserve.jobs.harvest.bound import ModelDiffers
from conserve.nightly.rounds import Rounds
from conserve.nightly.served_jobs import await_served
from conserve.nightly.targets import ModelAsked, with_target
from conserve.store.books.states import JobState

RUN, TOKEN, SUITE, ASK = "eval", "eval_token", "eval_suite", "eval_ask"  # tags
STEPS = {JobState.PAUSED: "resume", JobState.FAILED: "resume", JobState.EXPIRED: "retry"}
"""Command that goes on with a job in this state; a cancelled one is asked anew."""
ANEW = "begin another night, which asks all questions of this model, with: conserve eval run FILE --new"


class AskedJob(NamedTuple):
    """A job, and what answers it."""

    job_id: str
    target: ModelTarget


class SuiteNight:
    """One suite of one run (`conserve.nightly.suite.Night`)."""

    def __init__(
        self,
        settings: Settings,
        rounds: "Rounds[AskedJob, Any]",
        *,
        run_id: str,
        token: str = "",
        label: str,
        suite: SuitePlan,
        target: ModelTarget,
        folder: Path,
        model_asked: ModelAsked,
    ) -> None:
        self.store = Store(settings)
        self.run_id, self.suite, self.target, self.folder = run_id, suite, target, folder
        self.settings, self._rounds, self._label, self._token = settings, rounds, label, token
        self._targets: dict[str, ModelTarget] = {}
        self._model_asked = model_asked

    def submit_once(self, key: str, source: Source, *, target: ModelTarget | None = None, **task: Any) -> Job:
        """Job of this run, suite and key: one that an earlier try has queued, else a new one."""
        tags = {**tags_of(self.run_id, self._token), SUITE: self._label, ASK: key}
        known = (job for job in self.store.jobs(tags=tags) if job.status is not JobState.CANCELLED)
        asked = target or self.target
        job = next(known, None) or self._new(source, tags, {"model": self._model_asked(asked), **task})
        self._targets[job.id] = asked
        return job

    def await_answers(self, *jobs: Job) -> None:
        """Wait until each row of these jobs has a result; raises `JobRefused` for a job that ends otherwise.

        One that another model than the target's answered raises it too.
        """
        wanted = [AskedJob(job.id, self._targets.get(job.id, self.target)) for job in jobs]
        if any(job.status is not JobState.COMPLETED for job in jobs):
            self._rounds.wait(*wanted)
        for job, (_, target) in zip(jobs, wanted, strict=True):
            reading = job.progress()
            if reading.state is not JobState.COMPLETED:
                raise JobRefused(unanswered_words(job.id, reading.state))
            model = self._model_asked(target)
            if model is not None and reading.model not in (None, model):
                raise JobRefused(
                    f"{reading.model} answered job {job.id}, and this run has {model}", step=ANEW
                )

    def _new(self, source: Source, tags: Mapping[str, str], task: Mapping[str, Any]) -> Job:
        given = {"name": self._label.replace("@", "-"), "unknown_params": True, **task}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows that cannot be sent are items with an error
            return self.store.submit(source, tags=tags, **given)


def tags_of(run_id: str, token: str) -> dict[str, str]:
    """Tags that all jobs of a run have, and no others; runs of earlier versions have no token."""
    return {RUN: run_id} | ({TOKEN: token} if token else {})


def unanswered_words(job_id: str, state: JobState) -> str:
    """Sentence about a job that has rows without a result, with the command that goes on with it."""
    gone_on = f"`conserve {STEPS.get(state, 'status')} {job_id}`"
    step = "" if state is JobState.CANCELLED else f"run {gone_on}, then "
    return f"job {job_id} is {state} and has rows without a result; {step}run the evaluation again"


class Answering:
    """Answers jobs, target by target. One engine is up at a time.

    `work_s` counts the time in which it answered, `live_latencies` are of live requests beside a server's rows.
    """

    def __init__(self, settings: Settings, *, progress: bool, say: Callable[[str], None]) -> None:
        self._settings, self._progress, self._say = settings, progress, say
        self._engine: Engine | None = None
        self._target: ModelTarget | None = None
        self.work_s = 0.0
        self.live_latencies: LiveLatencies | None = None

    def answer(self, wanted: Sequence[AskedJob]) -> None:
        """Answer jobs, those of the engine that is up first."""
        targets = list(dict.fromkeys(one.target for one in wanted))
        for target in sorted(targets, key=lambda target: target != self._target):
            self._answer(target, [one.job_id for one in wanted if one.target == target])

    def _answer(self, target: ModelTarget, job_ids: Sequence[str]) -> None:
        if target.answered_by == "serve":
            begun = time.monotonic()
            for job_id in job_ids:
                job = Job(self._settings, job_id)
                self.live_latencies = await_served(job, self._settings, self.live_latencies, self._say)
            self.work_s += time.monotonic() - begun
            return
        arguments = RunArguments(engine=self._ready(target), progress=self._progress)
        try:
            done = portal.submit(drained_together(self._settings, job_ids, arguments)).result()
        except EndpointUnusable:
            self._withdraw(job_ids)
            raise
        except ModelDiffers as error:
            raise JobRefused(error.cause, step=ANEW) from error
        self.work_s += done.work_s

    def _withdraw(self, job_ids: Sequence[str]) -> None:
        """Cancel the jobs without an answer of a model that cannot be reached; the next try queues them anew.

        Another `conserve run` over the store would answer those that are bound to no model, by its own.
        """
        for job_id in job_ids:
            job = Job(self._settings, job_id)
            with suppress(JobRefused, JobNotFound):  # it has ended, or was removed
                if not job.progress().done:
                    job.cancel()

    def _ready(self, target: ModelTarget) -> Engine:
        """Engine of a target; the one of another target is closed first."""
        if self._engine is None or target != self._target:
            self.close()
            self._target, asked = target, with_target(self._settings, target)
            self._engine = Engine(
                asked.model,
                endpoint=asked.endpoint or UNSET,
                api_key=self._settings.api_key,
                engine_args=target.engine_args,
                progress=self._progress,
            )
        return self._engine

    def close(self) -> None:
        """Stop the engine that is up."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

"""`conserve pause`, `resume`, `cancel` and `retry`."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from conserve.cli import output
from conserve.cli.context import Context, job_ids
from conserve.cli.takers import Taker, taker, what_runs

if TYPE_CHECKING:
    from conserve.store.books.catalog import JobRecord

EXAMPLES = {
    "pause": "conserve pause gsm8k-k3f9",
    "resume": "conserve resume gsm8k-k3f9",
    "cancel": "conserve cancel gsm8k-k3f9",
    "retry": "conserve retry gsm8k-k3f9 && conserve run",
}

Jobs = Annotated[
    list[str],
    typer.Argument(metavar="JOB...", help="Job ids, or beginnings of them.", autocompletion=job_ids),
]


def pause(ctx: typer.Context, jobs: Jobs) -> None:
    """Stop taking rows of a job; rows in flight go back with the tokens they have."""
    move(ctx.obj, jobs, "pause")


def resume(ctx: typer.Context, jobs: Jobs) -> None:
    """Let a paused job go on, or a refused one try again."""
    move(ctx.obj, jobs, "resume")


def cancel(ctx: typer.Context, jobs: Jobs) -> None:
    """Stop a job for good; the results it has are kept."""
    move(ctx.obj, jobs, "cancel")


def retry(ctx: typer.Context, jobs: Jobs) -> None:
    """Put the failed rows of a job back into the queue, and the rows that were left when it expired."""
    from conserve.store.books import catalog
    from conserve.store.books.shards import retry_failed

    context: Context = ctx.obj
    taken: list[Taker | None] = []  # for each job
    with context.store() as store:
        with store.read() as tx:
            wanted = [catalog.get(tx, job) for job in jobs]
        for job in wanted:
            rows = retry_failed(store, job.id, now=time.time(), warn=output.say)
            if not rows and not (job.state == "expired" and job.unanswered):
                output.data(f"{job.id}: there is nothing to retry")
                continue
            taken.append(taker(context.settings(), store, job.model))
            left = f"{output.count(job.unanswered, 'row')} left and " if job.state == "expired" else ""
            output.data(f"{job.id}: {left}{output.count(rows, 'failed row')} back in the queue")
            with store.read() as tx:
                say_if_undated(job, catalog.get(tx, job.id))
    if taken:
        output.say(what_runs(taken[0] if all(taken) else None))


def move(context: Context, jobs: list[str], verb: str) -> None:
    """Apply the verb to all these jobs and print their states."""
    for before, job in move_all(context, jobs, verb):
        output.data(f"{job.id}: {job.state}")
        say_if_undated(before, job)


def move_all(context: Context, jobs: list[str], verb: str) -> list[tuple["JobRecord", "JobRecord"]]:
    """Apply the verb to all these jobs, or to none if one of them refuses it; returns each before and after."""
    from conserve.store.books import catalog

    with context.store() as store, store.write() as tx:
        catalog.lock_named(tx, jobs)
        return [(catalog.get(tx, job), catalog.move(tx, job, verb, now=time.time())) for job in jobs]


def say_if_undated(before: "JobRecord", after: "JobRecord") -> None:
    """Say so if a job that goes on has lost its deadline, which had passed."""
    if before.deadline is not None and after.deadline is None:
        output.say(
            f"{after.id}: its deadline ({output.moment(before.deadline)}) has passed, so it goes on without one; "
            f"give it another with: conserve deadline {after.id} --within 24h"
        )

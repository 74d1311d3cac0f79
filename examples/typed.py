"""ConServe from Python with its types: `make check` checks this program strictly, and a test runs it."""

import asyncio
from typing import assert_type

import conserve

ROWS = [{"q": "What is 2 + 2?"}, {"q": "What is 3 + 3?"}]


def blocking(store: conserve.Store) -> conserve.Job:
    """Answer the rows, and wait for each call."""
    job = assert_type(store.submit(ROWS, prompt="{{ q }}", params={"max_tokens": 8}), conserve.Job)
    outcome = assert_type(job.run(progress=False), conserve.Outcome)
    print(f"{outcome.succeeded} of {job.progress().rows} answered")
    for answer in job:
        assert_type(answer, conserve.Result)
    assert_type(job.status, conserve.JobState)
    return job


async def awaiting(store: conserve.Store) -> None:
    """Do the same in an event loop."""
    job = assert_type(await store.submit.aio(ROWS, prompt="{{ q }}"), conserve.Job)
    assert_type(await job.run.aio(progress=False), conserve.Outcome)
    async for answer in job:
        assert_type(answer.text, str | None)
    assert_type(await conserve.map.aio(ROWS, "{{ q }}", store=store, progress=False), conserve.Results)


def main() -> None:
    """Run both."""
    store = assert_type(conserve.open("typed"), conserve.Store)
    blocking(store)
    asyncio.run(awaiting(store))


if __name__ == "__main__":
    main()

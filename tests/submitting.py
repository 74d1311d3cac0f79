"""Jobs as tests queue them: a file by its name, and the terms one by one."""

from typing import Any

from conserve.jobs.inputs.source import Input
from conserve.jobs.requests import submit as requests
from conserve.jobs.requests.submit import Submitted
from conserve.jobs.task import Task
from conserve.store.database.store import Store
from tests.store_rows import terms_in


def submit(store: Store, given: Input | str, task: Task, **named: Any) -> Submitted:
    """Queue a job; `named` are its terms, and what else the submit takes."""
    given = Input(names=[given]) if isinstance(given, str) else given
    terms = terms_in(named)
    return requests.submit(store, given, task, terms, **named)

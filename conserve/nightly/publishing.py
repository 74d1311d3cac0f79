"""Reports of a run written to files, and its verdict posted to a webhook."""

import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from conserve.config import Settings
from conserve.errors import SettingsError, UsageError, one_line
from conserve.evals.plan import NightlyPlan, Reports
from conserve.evals.records import PREVIOUS, RunRecord
from conserve.nightly.redacted import host_of
from conserve.nightly.report.document import Document, against_of, document
from conserve.nightly.report.forms import SUFFIXES, text_in_form
from conserve.whole import write_whole

POST_S = 20.0
TRIES = 3
WAIT_S = 2.0
SIGNATURE = "X-Conserve-Signature"

Say = Callable[[str], None]


class Published(NamedTuple):
    """Document of a run, and sentences on the reports of it that could not be written."""

    document: Document
    unwritten: Sequence[str]


def publish(settings: Settings, run: RunRecord, plan: NightlyPlan, say: Say) -> Published:
    """Post the verdict, and write the reports that the file asks for; one that cannot be written costs no other."""
    try:
        against = against_of(settings.home, run, None, plan.against)
    except UsageError as error:
        say(f"{error}; this run is compared with the one before")
        against = PREVIOUS
    found = document(settings.home, run, against)
    if plan.reports.webhook is not None:
        say(post(found, plan.reports.webhook, plan.reports))
    unwritten = []
    if plan.reports.folder is not None:
        folder = Path(run.folder) / Path(plan.reports.folder).expanduser()
        for form in plan.reports.forms:
            try:
                say(f"wrote {write(found, form, folder / f'{run.id}{SUFFIXES[form]}')}")
            except UsageError as error:
                unwritten.append(str(error))
    return Published(found, unwritten)


def write(found: Document, form: str, path: Path) -> Path:
    """Write a report; raises `UsageError` where that is impossible."""
    try:
        write_whole(path, text_in_form(found, form).encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another folder") from error
    return path


def post(
    found: Document, address: str, reports: Reports, *, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Post the verdict, signed by HMAC-SHA-256 of the body; returns a sentence on how that went."""
    import httpx

    body = json.dumps({name: found[name] for name in ("headline", "run", "comparison")}).encode()
    headers = {"Content-Type": "application/json"}
    if (key := key_of(reports)) is not None:
        headers[SIGNATURE] = f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"
    said = ""
    for attempt in range(TRIES):
        if attempt:
            sleep(WAIT_S * attempt)
        try:
            answer = httpx.post(address, content=body, headers=headers, timeout=POST_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = one_line(str(error).replace(address, host_of(address))) or type(error).__name__
            continue
        if answer.is_success:
            return f"posted the verdict to {host_of(address)}"
        said = f"it answered {answer.status_code}"
        if answer.status_code < 500:
            break
    return f"the verdict was not posted to {host_of(address)}: {said}"


def key_of(reports: Reports) -> str | None:
    """Key of the signature; None without one. Raises `SettingsError` if its variable is empty."""
    if reports.secret_variable is None:
        return None
    key = os.environ.get(reports.secret_variable)
    if not key:
        raise SettingsError(
            f"reports.secret_variable names {reports.secret_variable}, which is not set; set it to the key"
        )
    return key

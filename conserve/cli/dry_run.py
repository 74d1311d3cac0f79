"""`conserve run --dry-run` and `conserve submit --dry-run`: the requests of a job, and their fit to the model."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from conserve.api.running import engine_flags
from conserve.cli import exits, output
from conserve.config import Settings, model_name
from conserve.hosts import without_login
from conserve.store.books.readings import JobReading, read_task

if TYPE_CHECKING:
    from conserve.jobs.requests.dry_run import DryRun, Refuses, Tokenizer
    from conserve.jobs.requests.preview import Preview

PROMPTS = ("messages", "prompt")  # fields of a body that get lines of their own


class Counter(NamedTuple):
    """A tokenizer, or the reason that a prompt has no count; the model that it is of, and what that refuses."""

    tokens: "Tokenizer | None"
    why_none: str
    model: str
    refuses: "Refuses" = lambda url, body: None


def show_dry_run(
    settings: Settings, jobs: Sequence[JobReading], flags: list[str], *, rebind: bool = False, as_json: bool
) -> int:
    """Print how many rows of these jobs can be answered; returns 1 if a job is refused, 5 if rows fail, else 0."""
    counter, found = asyncio.run(dry_runs(settings, jobs, flags, rebind=rebind))
    for one in found:
        for line in summary_lines(one, settings, counter):
            output.say(line)
    output.say("nothing was sent, and the queue is as it was")
    if as_json:
        output.data_json({"jobs": {one.job_id: document(one) for one in found}})
    if any(one.refused for one in found):
        return exits.FAILED
    return exits.FAILED_ROWS if any(one.unrendered or one.too_long for one in found) else exits.DONE


async def dry_runs(
    settings: Settings, jobs: Sequence[JobReading], flags: list[str], *, rebind: bool
) -> "tuple[Counter, list[DryRun]]":
    """Make every request, and count the tokens of its prompt."""
    from conserve.jobs.requests.dry_run import dry_run_of
    from conserve.jobs.task import Task

    counter = await counter_of(settings, flags)
    try:
        found = []
        for job in jobs:
            task = Task.from_json(read_task(settings, job.id))
            found.append(await dry_run_of(settings, job, task, counter.tokens, counter.refuses))
            found[-1].refused = None if rebind else why_left_alone(job, counter.model)
        return counter, found
    finally:
        close = getattr(counter.tokens, "close", None)
        if close is not None:
            await close()


def why_left_alone(job: JobReading, model: str) -> str | None:
    """Reason for which a run with this model would leave the job alone; None if it would not."""
    from conserve.jobs.harvest.bound import bound_elsewhere

    return None if job.model in (None, model) else str(bound_elsewhere(job.id, str(job.model), model))


async def counter_of(settings: Settings, flags: list[str]) -> Counter:
    """Tokenizer of the server, or of the local model."""
    if settings.endpoint is None:
        return local_counter(settings, settings.engine_model, engine_flags(settings, flags))
    if settings.endpoint.startswith("fake:"):
        from conserve.endpoints.fake import Script

        fake = Script.from_url(settings.endpoint).model
        return Counter(None, "the fake endpoint has no tokenizer", fake)
    from conserve.endpoints.tokens import ServerTokens

    tokens = await ServerTokens.ask(settings.endpoint, api_key=settings.api_key, model=settings.model)
    return Counter(tokens, f"{without_login(settings.endpoint)} has no /tokenize for them", tokens.model)


def local_counter(settings: Settings, model: str, flags: Sequence[str] = ()) -> Counter:
    """Tokenizer of a model on this machine, and what the embedded engine refuses."""
    from conserve.engine.vllm.model.demo_model import is_to_convert
    from conserve.engine.vllm.model.tokenizer import folder_tokens
    from conserve.engine.vllm.requests.refused import rejection_of

    tokens = folder_tokens(model, settings.models_folder, flags)
    later = "; the first run puts it there" if is_to_convert(model, settings.models_folder) else ""
    why = (
        f"no tokenizer of {model} is on this machine{later}"
        if tokens is None
        else f"the chat template of {model} does not take them"
    )
    return Counter(tokens, why, model_name(model), rejection_of)


def summary_lines(found: "DryRun", settings: Settings, counter: Counter) -> list[str]:
    """Sentences on a job's rows: how many, their longest prompt, those that are too long."""
    lines = [f"{found.job_id}: {output.count(found.rows, 'row')} to run"]
    if found.longest is not None:
        longest = f"the longest {found.longest.tokens:,} (row {found.longest.row_index:,})"
        lines[0] += f", {found.prompt_tokens:,} prompt tokens, {longest}"
    if found.unrendered:
        lines.append(f"{found.job_id}: {found.unrendered:,} of them cannot be answered ({found.first_error})")
    if (first := found.first_too_long) is not None and counter.tokens is not None:
        verb = "is" if found.too_long == 1 else "are"
        wanted = f" and wants {first.answer:,} more" if first.answer else ""
        lines.append(
            f"{found.job_id}: {found.too_long:,} of them {verb} too long for a context of "
            f"{counter.tokens.context:,} tokens: row {first.row_index:,} has {first.tokens:,}{wanted}"
        )
    if found.cut_short:
        lines.append(
            f"{found.job_id}: {found.cut_short:,} answers may be cut short by the end of the context"
        )
    if found.refused is not None:
        lines.append(f"refused: {found.refused}")
    if uncounted := found.rows - found.unrendered - found.counted:
        lines.append(
            f"{found.job_id}: {output.count(uncounted, 'prompt')} could not be counted: {counter.why_none}"
        )
    return lines


def document(found: "DryRun") -> dict[str, Any]:
    """Dry run of a job as JSON (docs/reference/json.md)."""
    values = asdict(found)
    del values["job_id"]
    return {
        **values,
        "longest": length_document(found.longest),
        "first_too_long": length_document(found.first_too_long),
    }


def length_document(length: Any) -> dict[str, Any] | None:
    """Length of a row as JSON."""
    return None if length is None else length._asdict()


async def lengths(previews: "Sequence[Preview]", counter: Counter) -> list[int | None]:
    """Tokens of each prompt; None where the tokenizer cannot count it."""
    from conserve.jobs.requests.dry_run import prompt_tokens

    if counter.tokens is None:
        return [None] * len(previews)
    return [
        None if one.body is None else await prompt_tokens(one.url, one.body, counter.tokens)
        for one in previews
    ]


def show_previews(
    previews: "Sequence[Preview]", counter: Counter, params: Mapping[str, Any], *, as_json: bool
) -> None:
    """Print the requests as they would be sent."""
    tokens = asyncio.run(lengths(previews, counter))
    for one, number in zip(previews, tokens, strict=True):
        if as_json:
            output.data_json(one._asdict() | {"tokens": number})
        else:
            output.data(output.visible("\n".join(lines_of(one, number, params)), sys.stdout))
    given = ", ".join(f"{name} {json.dumps(value)}" for name, value in params.items())
    output.say(f"{'with ' + given + '; ' if given else ''}nothing was queued")


def lines_of(preview: "Preview", tokens: int | None, params: Mapping[str, Any]) -> list[str]:
    """Lines of one request for a reader."""
    head = f"row {preview.row_index:,}"
    head += f", id {preview.custom_id}" if preview.custom_id is not None else ""
    head += f", {output.count(tokens, 'token')}" if tokens is not None else ""
    if preview.body is None:
        return [f"{head} cannot be answered: {preview.error}"]
    return [head, *(f"  {part}" for part in parts_of(preview.body, params))]


def parts_of(body: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    """Messages or prompt of a body, then the fields that only this row has."""
    if "messages" in body:
        parts = [message_text(message) for message in body["messages"]]
    else:
        parts = [labelled("prompt", body.get("prompt"))]
    own = {name: value for name, value in body.items() if name not in (*PROMPTS, *params)}
    return [*parts, *([labelled("with", own)] if own else [])]


def message_text(message: Mapping[str, Any]) -> str:
    """One message of a chat, as `role: text`."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    said = labelled(str(message.get("role")), message.get("content"))
    return f"{said} {json.dumps(rest, ensure_ascii=False)}" if rest else said


def labelled(label: str, value: Any) -> str:
    """Text behind its label, further lines below the first; other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{label}: {text}".replace("\n", "\n" + " " * (len(label) + 4))

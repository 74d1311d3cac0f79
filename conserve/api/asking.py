"""Jobs as they are asked for, on the command line or from Python: the input, the task and its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conserve.errors import UsageError, one_line
from conserve.units import count

if TYPE_CHECKING:
    from conserve.jobs.inputs.source import Input
    from conserve.jobs.requests.submit import Submitted
    from conserve.jobs.task import Order, Task


def make_input(
    files: Sequence[str], *, sql: str | None, form: str | None, keep: str | None, copy_gib: float
) -> "Input":
    """Input of files, patterns and folders, or of a query; and how to keep it."""
    from conserve.jobs.inputs.files import FileFormat
    from conserve.jobs.inputs.keeping import Keep
    from conserve.jobs.inputs.source import Input

    if not files and sql is None:
        raise UsageError('there is no input; name a file, - for standard input, or --sql "select ..."')
    if form is not None and form not in tuple(FileFormat):
        raise UsageError(f"--format takes {', '.join(FileFormat)}, not {form!r}")
    if keep is not None and keep not in tuple(Keep):
        raise UsageError(f"--keep-input takes {', '.join(Keep)}, not {keep!r}")
    return Input(
        names=files,
        sql=sql,
        form=FileFormat(form) if form else None,
        keep=Keep(keep) if keep else None,
        copy_gib=copy_gib,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """Flags and arguments that say what is asked of each row of a job."""

    prompt: str | None = None
    messages: str | None = None
    system: str | None = None
    completions: bool = False
    id_column: str | None = None
    order: str = "prefix"
    params: Mapping[str, Any] = field(default_factory=dict)
    flag_params: Mapping[str, Any] = field(default_factory=dict)  # with a flag of their own; None: not given
    logprobs: int | None = None
    schema: Mapping[str, Any] | None = None
    unknown_params: bool = False

    def task(self) -> "Task":
        """Task of the job: a prompt template, a column of chats, or lines in OpenAI's form."""
        from conserve.endpoints.protocol import Url
        from conserve.jobs.task import Kind, Task

        params = self._body_fields()
        is_prompt, is_chat = self.prompt is not None, self.messages is not None
        if is_prompt and is_chat:
            raise UsageError("give --prompt or --messages, not both")
        if self.completions and (is_chat or self.system is not None):
            raise UsageError("--completions sends bare text: it takes --prompt and no --messages or --system")
        of_rows = self.system is not None or self.id_column is not None or self.completions
        if of_rows and not (is_prompt or is_chat):
            raise UsageError("--system, --id and --completions go with --prompt or --messages")
        order, order_seed = order_of(self.order)
        return Task(
            kind=Kind.PROMPT if is_prompt else Kind.MESSAGES if is_chat else Kind.OPENAI,
            url=Url.COMPLETIONS if self.completions else Url.CHAT,
            template=self.prompt,
            column=self.messages,
            system=self.system,
            id_column=self.id_column,
            params=params,
            order=order,
            order_seed=order_seed,
        )

    def _body_fields(self) -> dict[str, Any]:
        """Fields of every request: those with flags of their own, then `params`."""
        from conserve.jobs.requests.parameter_names import unknown_name

        fields = {name: value for name, value in self.flag_params.items() if value not in (None, [])}
        if self.logprobs is not None and self.completions:
            fields["logprobs"] = self.logprobs
        elif self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.schema is not None:
            answer = {"name": "answer", "schema": dict(self.schema), "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": answer}
        if both := sorted(fields.keys() & self.params.keys()):
            raise UsageError(f"{both[0]} is given twice, by a flag of its own and by --param; leave one out")
        if not self.unknown_params and (unknown := unknown_name(self.params)) is not None:
            raise UsageError(f"--param: {one_line(unknown)}")
        return fields | dict(self.params)


def order_of(wanted: str) -> "tuple[Order, int]":
    """Order and seed of --order."""
    from conserve.jobs.task import Order

    name, colon, seed = wanted.partition(":")
    if name not in tuple(Order) or (colon and name != Order.RANDOM):
        raise UsageError(f"--order takes prefix, input, random or random:SEED, not {wanted!r}")
    if colon and not (seed.isascii() and seed.isdigit()):
        raise UsageError(f"--order random:SEED takes a whole number, as in --order random:7, not {seed!r}")
    return Order(name), int(seed or 0)


def unanswerable(done: "Submitted") -> str | None:
    """Sentence on rows that will fail without being sent; None if there are none."""
    if not done.unrendered:
        return None
    percent = f"{100 * done.unrendered / done.rows:.3g} %"
    share = f"{done.unrendered:,} of {count(done.rows, 'row')} ({percent})"
    first = f"the first is row {done.first_row:,}: {one_line(done.first_error)}"
    return f"{share} cannot be answered and will fail; {first}"

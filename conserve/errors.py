"""Exceptions of ConServe.

ConserveError                  one sentence for the user, with the next command; exit 1 unless said otherwise
├── UsageError                 the user can fix it by asking differently; exit 2
│   ├── InputError             an input file that cannot become a job (truncated, wrong type, no rows)
│   ├── TemplateError          a prompt template that does not compile or names a missing column
│   ├── SettingsError          a flag, variable or conserve.toml entry that makes no sense
│   ├── JobNotFound            no such job; names the nearest
│   ├── Overloaded             `conserve bench`: live requests queue without any offline row beside them
│   ├── PackageMissing         a package that ConServe does not depend on, as pandas, is not installed
│   ├── QueryError             SQL that is wrong, or that the sandbox forbids
│   └── GridTooLarge           a profile was asked for that does not fit the KV cache or the model
├── QueryTooGreedy             a query that needs more memory, temporary disk or time than it may have
├── ProfileError               no latency profile that could be used
│   ├── ProfileMissing         none for this model on this machine; names the command that makes one
│   ├── ProfileMismatch        it was measured with another device, model, version or flag
│   ├── ProfileDamaged         a file that is truncated, was edited or is none
│   ├── ProfileDerived         derived from published numbers: good for simulation, not for serving
│   └── ProfilingFailed        the engine died or could not be measured; an older profile is kept
├── ServiceFailed              `conserve serve` could not start its server
├── SpillRefused               KV blocks on disk that are damaged or of another engine; they are computed again
├── JobRefused                 the job cannot be run or changed as things stand (its input file changed, say)
├── EvaluationUnready          the data of an evaluation cannot be read
├── RowsFailed                 rows of an evaluation failed, so that it has no score
├── StoreError                 the store cannot be read or written
│   ├── StoreTooNew            made by a newer version
│   ├── StoreReadOnly          no permission to write
│   ├── StoreForbidden         files of one job cannot be used here: permissions, or storage that fails
│   ├── StoreFull              no space left
│   ├── StoreMoved             the store is in another database now, or on its way there
│   ├── StoreInUse             harvesters hold rows, and the command needs the store for itself
│   ├── StoreUnreachable       the bucket with the files of its jobs cannot be reached
│   ├── DatabaseDamaged        the database itself says that it is damaged, or is none
│   └── StoreDamaged           a file or a record of a job is missing or not what was written
└── EndpointError              an endpoint's answer that is no completion
    ├── EndpointUnusable       cannot serve at all (no engine installed, no such model); stops the run
    │   └── ModelUnnamed       has several models, and none was named; exit 2
    ├── RequestRejected        this request can never succeed; the row fails with `kind`
    └── RetryableError         the same request may succeed later
        ├── EndpointBusy       asked to slow down (429, 503), perhaps until `retry_after_s`
        ├── EndpointUnavailable  out of reach (connection, 504); says nothing about the row
        │   └── EndpointFailing  reached, and it answers no other request either; says nothing about the row
        ├── EndpointFault      reached, and no usable answer: a 500, garbage
        │   └── AnswerTooLong  the answer took longer, or had more bytes, than allowed
        ├── ServerLost         went down, or began to fail, with this request; the store counts it against the row
        └── EngineDied         the engine stopped while this request was in it; the request is a suspect

Warnings from Python, which the command line prints: `RowsLeftOut` and `RowsUnanswerable`.
"""

from typing import Self


def one_line(said: object, *, most: int = 500) -> str:
    """Text of another program as part of a sentence: on one line, at most `most` characters, and safe to print.

    Control characters, lone surrogates and the like appear as escapes, so that a terminal, a file and a
    database all take the text.
    """
    text = str(said)
    line = " ".join(text[: 4 * most].split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shown if len(shown) <= most and len(text) <= 4 * most else f"{shown[: most - 1]}…"


def first_line(error: Exception) -> str:
    """First line of an error's text; the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


RUN_DOCTOR = "run: conserve doctor"
SEE_DOCTOR = "see: conserve doctor"
"""Next steps that `conserve doctor` itself leaves out."""


class ConserveError(Exception):
    """One sentence for the user that names the cause and the next command.

    `cause` and `step` are its two parts, with `joint` between them. Without `step` the cause is the whole sentence.
    """

    exit_code = 1

    def __init__(self, cause: str, *, step: str | None = None, joint: str = "; ") -> None:
        super().__init__(cause if step is None else f"{cause}{joint}{step}")
        self.cause, self.step, self.joint = cause, step, joint

    def without(self, step: str) -> str:
        """The sentence; its cause alone if this is the next step."""
        return self.cause if self.step == step else str(self)


class UsageError(ConserveError):
    """A mistake in the command line or its files, which the user can mend."""

    exit_code = 2


class InputError(UsageError):
    """An input file that cannot become a job. Names and values of the user's in it are made safe to print."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, most=2000))


class TemplateError(UsageError):
    """A prompt template that does not compile, or that names a missing column."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, most=2000))


class SettingsError(UsageError):
    """A flag, a variable or an entry of conserve.toml that makes no sense."""


class JobNotFound(UsageError):
    """No job goes by that id."""


class Overloaded(UsageError):
    """Live requests queue without any offline row beside them: nothing is left to compare."""


class PackageMissing(UsageError):
    """A package that ConServe does not depend on is not installed."""


class QueryError(UsageError):
    """SQL that is wrong, or that the sandbox forbids."""


class QueryTooGreedy(ConserveError):
    """A query that needs more memory, temporary disk or time than it may have."""


class GridTooLarge(UsageError):
    """A profile was asked for that does not fit the KV cache, the model or the engine's limits."""


class ProfileError(ConserveError):
    """No usable latency profile."""


class ProfileMissing(ProfileError):
    """No profile for this model on this machine."""


class ProfileMismatch(ProfileError):
    """A profile that was measured with another device, model, version or flag."""


class ProfileDamaged(ProfileError):
    """A profile file that is truncated, was edited or is no profile."""


class ProfileDerived(ProfileError):
    """A profile derived from published numbers, which is for simulation and not for serving."""


class ProfilingFailed(ProfileError):
    """The engine died while it was measured, or could not be measured at all."""


class ServiceFailed(ConserveError):
    """The server did not come up."""


class SpillRefused(ConserveError):
    """KV blocks on disk are damaged, or of another engine."""


class JobRefused(ConserveError):
    """The job cannot be run or changed as things stand."""


class EvaluationUnready(ConserveError):
    """The data of an evaluation cannot be read."""


class RowsFailed(ConserveError):
    """Rows of an evaluation failed, so that it has no score."""


class StoreError(ConserveError):
    """The store cannot be read or written."""


class StoreTooNew(StoreError):
    """The store was made by a newer version of ConServe."""


class StoreReadOnly(StoreError):
    """The store may not be written."""

    @classmethod
    def at(cls, where: object) -> Self:
        """The error of a store at this path or URL."""
        return cls(f"the store {where} is read-only; make it writable or set CONSERVE_HOME")


class StoreForbidden(StoreError):
    """This process cannot use a file of the job `job_id`, or of all, which others on the store perhaps can.

    Permissions or storage keep it from `file`, and `why` says which; nothing is known of what is in the file.
    """

    def __init__(
        self,
        cause: str,
        *,
        step: str | None = None,
        job_id: str | None = None,
        file: object = None,
        why: str = "",
    ) -> None:
        super().__init__(cause, step=step)
        self.job_id, self.file, self.why = job_id, file, why

    @classmethod
    def of(cls, error: PermissionError) -> Self:
        """The error of a file that this user may not use."""
        said = f"{error.filename} cannot be used: {error.strerror}; change its permissions"
        return cls(f"{said}, or name another store by CONSERVE_HOME")


class StoreFull(StoreError):
    """The disk under the store is full."""


class StoreMoved(StoreError):
    """The store is in another database now, or on its way there; `for_good` once it has arrived."""

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


class StoreInUse(StoreError):
    """Harvesters hold rows, and the command needs the store for itself."""


class StoreUnreachable(StoreError):
    """The bucket that holds the files of the store cannot be reached, or refuses; nothing is damaged by that."""


class DatabaseDamaged(StoreError):
    """The database says that it is damaged: its pages, its tables or its texts, or the file is no database."""


class StoreDamaged(StoreError):
    """A file or record of the store is missing or differs from what was written; `job_id` if one job's alone."""

    def __init__(self, cause: str, *, step: str | None = None, job_id: str | None = None) -> None:
        super().__init__(cause, step=step)
        self.job_id = job_id


class EndpointError(ConserveError):
    """An endpoint's answer that is no completion; `status` is its HTTP status, where that is known."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EndpointUnusable(EndpointError):
    """The endpoint cannot serve at all: the run stops, and no row fails."""


class ModelUnnamed(EndpointUnusable):
    """The endpoint has several models, and neither a flag nor a setting names the one to ask."""

    exit_code = 2


class RequestRejected(EndpointError):
    """This request can never succeed, however often it is sent.

    `kind` is a short stable word for the result row: ``too_long``, ``invalid_request``, ``template``.
    """

    def __init__(self, message: str, *, kind: str = "invalid_request") -> None:
        super().__init__(message)
        self.kind = kind


class RetryableError(EndpointError):
    """The same request may succeed later."""

    kind = "retryable"


class EndpointBusy(RetryableError):
    """The endpoint asked to slow down, perhaps for `retry_after_s` seconds."""

    kind = "busy"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EndpointUnavailable(RetryableError):
    """The endpoint cannot be reached; that says nothing about the row."""

    kind = "unavailable"


class EndpointFailing(EndpointUnavailable):
    """The endpoint was reached, and answers no other request either: its fault says nothing about the row."""


class EndpointFault(RetryableError):
    """The endpoint was reached and gave no usable answer: a 500, garbage, or nothing in time."""

    kind = "endpoint_fault"


class AnswerTooLong(EndpointFault):
    """The answer took longer, or had more bytes, than allowed, of a server that is up."""


class EngineDied(RetryableError):
    """The engine stopped while this request was in it, perhaps because of it."""

    kind = "engine_died"


class ServerLost(RetryableError):
    """The server went down, or began to fail, while it had this request, perhaps because of it.

    `kind` is that of a row which turns out to be the reason.
    """

    kind = EngineDied.kind

    def __init__(self, message: str, *, kind: str = EngineDied.kind) -> None:
        super().__init__(message)
        self.kind = kind


class RowsLeftOut(UserWarning):
    """Rows that cannot be read are missing from an answer."""


class RowsUnanswerable(UserWarning):
    """Rows of a new job cannot be sent, and will fail."""

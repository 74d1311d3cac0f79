"""Files and connections that this process may have open: its limit is raised, and a full one recognised."""

import errno
import resource
from collections.abc import Iterator

MOST = 65_535  # as vLLM raises the limit, if it may


def raise_limit() -> int:
    """Raise the soft limit on open files as far as this process may; returns the files that it may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def too_many(error: BaseException) -> str | None:
    """Sentence on an error that the limit caused, and the next command; None for another error."""
    if not any(isinstance(one, OSError) and one.errno == errno.EMFILE for one in causes(error)):
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {soft:,} files and connections open at once, and has; "
        "give a smaller --window, or run before: ulimit -n 65535"
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors behind it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__

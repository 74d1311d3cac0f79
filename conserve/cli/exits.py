"""Exit codes, as docs/scripting.md lists them."""

DONE = 0
FAILED = 1
USAGE = 2
CANCELLED = 3
FAILED_ROWS = 5
INTERRUPTED = 130
CLOSED = 141  # 128 + SIGPIPE

"""Exit codes (docs/reference/exit-codes.md)."""

DONE = 0
FAILED = 1
CANCELLED = 3
PAUSED = 4
FAILED_ROWS = 5
WORSE = 6  # `eval gate`
CANNOT_TELL = 7  # `eval gate`
INTERRUPTED = 130
CLOSED = 141  # 128 + SIGPIPE

WORST_FIRST = (INTERRUPTED, FAILED, CANCELLED, PAUSED, FAILED_ROWS, DONE)  # of `run`

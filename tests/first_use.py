"""A program whose processes each fork a child for a query while another thread begins to use DuckDB.

python -m tests.first_use

Each process lets the thread begin a little earlier than the one before. What a process does once, this program must
not have done yet. It prints how many of the children answered, and of how many.
"""

import os
import threading
import time
from collections.abc import Callable

import duckdb

from conserve.store.sql import answer, child
from conserve.store.sql.answer import PreparedDatabase

ATTEMPTS = 20
HANGS_S = 20.0  # a child has no more to do than a statement


def first_use() -> None:
    """Run the first statement of a process."""
    with duckdb.connect(":memory:", config={"threads": 1}) as duck:
        duck.execute("select 1").fetchall()


def answers(after_s: float) -> bool:
    """Fork a child that uses DuckDB so long after another thread began to; False if it hangs."""
    threading.Thread(target=first_use).start()
    time.sleep(after_s)
    PreparedDatabase().for_next()

    def work(send: child.Send) -> None:
        first_use()
        send(answer.DONE, b"")

    with child.working(work, timeout_s=HANGS_S) as frames:
        try:
            return [frame.kind for frame in frames] == [answer.DONE]
        except child.TookTooLong:
            return False


def in_a_process(work: Callable[[], bool]) -> bool:
    """Result of a function in a process forked off this one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    return os.waitpid(pid, 0)[1] == 0


def took() -> float:
    """Seconds that the first use takes."""
    begun = time.monotonic()
    in_a_process(lambda: first_use() is None)
    return time.monotonic() - begun


if __name__ == "__main__":
    length_s = took()
    done = [in_a_process(lambda at=at: answers(length_s * at / ATTEMPTS)) for at in range(ATTEMPTS)]
    print(sum(done), "of", len(done))

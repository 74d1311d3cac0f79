"""The courier: sends the messages that are due, until each receiver has its own or every attempt has failed."""

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import conserve
from conserve import owners
from conserve.errors import StoreError, one_line
from conserve.jobs.hooks import signature
from conserve.jobs.hooks.addresses import Resolve, resolved
from conserve.jobs.hooks.wire import ReceiverAnswer, post
from conserve.store.books import hooks, outbox
from conserve.store.books.hooks import Hook
from conserve.store.books.outbox import MessageRecord, MessageState, SendAttempt
from conserve.store.database.connection import of_one_machine
from conserve.store.database.store import Store

log = logging.getLogger(__name__)

AT_ONCE = 8
LOOK_S = 2.0
LAST_S = 30.0  # at the end of a process
KEPT_S = 30 * 86_400.0  # messages that are over, for `conserve hooks log`
FORGET_S = 3600.0  # between two looks for messages that are older
GONE = 410  # the receiver wants no more messages

Fault = type[Exception] | None  # kind of a step's error; None for a step that was done

MINUTE_S, HOUR_S = 60.0, 3600.0
FIRST_PAUSES_S = (
    5.0,
    5 * MINUTE_S,
    30 * MINUTE_S,
    2 * HOUR_S,
    5 * HOUR_S,
    10 * HOUR_S,
    14 * HOUR_S,
    20 * HOUR_S,
)
PAUSES_S = (*FIRST_PAUSES_S, 72 * HOUR_S - sum(FIRST_PAUSES_S))
"""Pauses between attempts; the tenth and last comes three days after the first."""


class Courier:
    """Sends messages of a store; any number of couriers in any processes may do so."""

    def __init__(
        self,
        store: Store,
        *,
        resolve: Resolve = resolved,
        clock: Callable[[], float] = time.time,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._store, self._resolve, self._clock = store, resolve, clock
        self._owner = owners.this_process()
        self._context = context
        self._forgotten_at = 0.0
        self.delivered = self.failed = 0  # attempts of this courier
        self._counting = threading.Lock()
        self._busy: list[threading.Thread] = []
        self._over = threading.Event()

    @property
    def owner(self) -> str:
        """This process, as the holder of messages."""
        return self._owner

    def step(self) -> None:
        """Begin to send what is due, in threads that go on until nothing is; waits for no receiver."""
        self._busy = [thread for thread in self._busy if thread.is_alive()]
        if len(self._busy) < AT_ONCE:
            for mine in self._claim(AT_ONCE - len(self._busy)):
                self._busy.append(threading.Thread(target=self._work, args=[mine], name="hook", daemon=True))
                self._busy[-1].start()
        self._forget()

    def finish(self, within_s: float) -> None:
        """Send what is due, and wait for its receivers for so long."""
        until = time.monotonic() + within_s
        while True:
            self.step()
            if not self._busy or time.monotonic() >= until:
                return
            self._busy[0].join(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Claim nothing more."""
        self._over.set()

    def _work(self, mine: MessageRecord | None) -> None:
        """Send a message, and then others that are due."""
        try:
            while mine is not None:
                self.send(mine)
                mine = next(iter(self._claim(1)), None)
        except StoreError as error:
            log.warning("%s", error)
        except Exception:
            log.exception("a message to a hook was not sent")

    def _claim(self, limit: int) -> list[MessageRecord]:
        if self._over.is_set():
            return []
        now = self._clock()
        with self._store.read() as tx:
            dead = owners.dead(outbox.holders(tx), one_machine=of_one_machine(tx))
        if dead:
            with self._store.write() as tx:
                outbox.release(tx, dead)
        with self._store.read() as tx:
            turn = outbox.turn(tx, now=now, limit=limit) if outbox.any_due(tx, now=now) else []
        if not turn:
            return []
        with self._store.write() as tx:
            return outbox.claim(tx, turn, owner=self._owner, now=now)

    def send(self, mine: MessageRecord) -> None:
        """Try to send a message that this process holds, and write down what came of it."""
        try:
            with self._store.read() as tx:
                hook = hooks.get(tx, mine.hook_id)
            answer, error = self._tried(hook, mine)
        except StoreError:
            raise
        except Exception as fault:  # no answer, or a hook that is damaged: given up in its time
            said = f"{type(fault).__name__}: {one_line(fault, most=200)}"
            answer, error = None, said.removesuffix(": ")
        attempt = SendAttempt(at=self._clock(), status=answer.status if answer else None, error=error)
        state, next_at = verdict(mine, attempt, answer.retry_after_s if answer else None)
        with self._store.write() as tx:
            outbox.record(tx, mine, attempt, state=state, next_at=next_at)
            if attempt.status == GONE:
                hooks.end(tx, mine.hook_id, "its receiver answered 410 Gone", now=attempt.at)
        with self._counting:
            self.delivered += error is None
            self.failed += error is not None
        if state is MessageState.GIVEN_UP:
            log.warning("the message %s to %s is given up: %s", mine.id, mine.hook_id, error)

    def _tried(self, hook: Hook, mine: MessageRecord) -> tuple[ReceiverAnswer | None, str | None]:
        """Answer of the receiver, and why it is no receipt; None if it is one."""
        if hook.ended_at is not None:
            return None, "the hook has ended"
        headers = {
            "content-type": "application/json",
            "user-agent": f"ConServe/{conserve.__version__} webhooks",
            **signature.headers(hook.secret, mine.id, mine.body, now=self._clock()),
        }
        from conserve.endpoints.exchange import certificates  # with httpx

        self._context = self._context or certificates()
        answer = post(
            hook.url,
            mine.body,
            headers,
            private=hook.allow_private,
            context=self._context,
            resolve=self._resolve,
        )
        return answer, None if 200 <= answer.status < 300 else refused(answer.status)

    def _forget(self) -> None:
        now = self._clock()
        if abs(now - self._forgotten_at) < FORGET_S:
            return
        self._forgotten_at = now
        with self._store.write() as tx:
            outbox.forget(tx, before=now - KEPT_S)


def refused(status: int) -> str:
    """Sentence on an answer that is no receipt."""
    redirect = "; redirects are not followed" if 300 <= status < 400 else ""
    return f"the receiver answered {status}{redirect}"


def verdict(
    mine: MessageRecord, attempt: SendAttempt, retry_after_s: float | None = None
) -> tuple[MessageState, float | None]:
    """State of a message behind an attempt, and when it is tried again."""
    if attempt.error is None:
        return MessageState.DELIVERED, None
    if attempt.status == GONE:
        return MessageState.DROPPED, None
    if mine.event == outbox.TEST or mine.attempts >= len(PAUSES_S):
        return MessageState.GIVEN_UP, None
    pause_s = max(PAUSES_S[mine.attempts], min(retry_after_s or 0.0, outbox.LONGEST_WAIT_S))
    return MessageState.WAITING, attempt.at + pause_s


@contextmanager
def sending(store: Store, *, look_s: float = LOOK_S, last_s: float = LAST_S) -> Iterator[None]:
    """Send messages beside the work of this process, and those of its end before it goes.

    A store that cannot be reached now is asked again at the next look; a fault that lasts is logged once.
    """
    courier, over = Courier(store), threading.Event()
    fault: Fault = None

    def look() -> None:
        nonlocal fault
        while not over.wait(look_s):
            fault = guarded(courier.step, fault)

    thread = threading.Thread(target=look, name="hooks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(last_s)
        guarded(lambda: courier.finish(last_s), fault)
        courier.stop()


def guarded(step: Callable[[], None], before: Fault = None) -> Fault:
    """Do a step of a courier; returns its fault. One like that of the step before has been logged then."""
    try:
        step()
    except StoreError as error:  # its words may change in the course of an outage
        if before is not StoreError:
            log.warning("%s", error)
        return StoreError
    except Exception as error:
        if before is not type(error):
            log.exception("messages to hooks were not sent")
        return type(error)
    return None

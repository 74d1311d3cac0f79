"""Hooks: every change of a job is in the outbox, and its message reaches the receiver, signed, at least once."""

import ast
import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import httpcore
import openai
import pytest
from sqlalchemy import Connection, update

import conserve as package
from conserve import owners
from conserve.endpoints.exchange import certificates
from conserve.errors import StoreError, UsageError
from conserve.jobs.hooks import signature
from conserve.jobs.hooks.addresses import NotPublic, allowed, checked_url, is_public, resolved
from conserve.jobs.hooks.courier import AT_ONCE, PAUSES_S, Courier, guarded, sending, verdict
from conserve.jobs.hooks.wire import CheckedBackend, TimedStream, post
from conserve.store.books import batches, catalog, events, hooks, outbox, shards
from conserve.store.books.batches import InputFault, NewBatch
from conserve.store.books.events import Event
from conserve.store.books.hooks import Hook
from conserve.store.books.outbox import MessageRecord, MessageState, SendAttempt
from conserve.store.books.states import FailedBy
from conserve.store.database import schema
from conserve.store.database.store import Store
from conserve.store.upkeep import rebuild
from tests.commands import conserve, until
from tests.receiver import Received, Receiver, receiving
from tests.store_rows import add_job, finish, leased, of_another_boot, select

HOUR_S = 3600.0
EXAMPLE = "https://example.com/hook"


def hook(store: Store, url: str = EXAMPLE, events: tuple[Event, ...] = tuple(Event), **named: Any) -> Hook:
    with store.write() as tx:
        return hooks.add(tx, url, events=events, **{"now": 0.0, **named})


def submitted(store: Store, job_id: str = "job-1", **named: Any) -> str:
    """A job as `conserve submit` queues it."""
    add_job(store, job_id, **named)
    with store.write() as tx:
        batches.of_submitted(tx, job_id, now=0.0)
    return job_id


def claimed(tx: Connection, *, owner: str, now: float) -> list[MessageRecord]:
    return outbox.claim(tx, outbox.turn(tx, now=now, limit=8), owner=owner, now=now)


def asked(store: Store, project: str = "default", job_id: str | None = None) -> str:
    """A batch as a client asks for it, with its job if it is to have one."""
    with store.write() as tx:
        new = NewBatch(file_id="file-1", endpoint="/v1/completions", completion_window="24h", window_s=60.0)
        batch_id = batches.add(tx, project, new, now=0.0)
    if job_id is not None:
        add_job(store, job_id)
        with store.write() as tx:
            batches.bind(tx, batch_id, job_id, now=0.0)
    return batch_id


def batch(store: Store, batch_id: str) -> batches.BatchRecord:
    with store.read() as tx:
        found = batches.anywhere(tx, batch_id)
    assert found is not None
    return found


def told(store: Store, **named: Any) -> list[str]:
    """Events in the outbox, the oldest first."""
    with store.read() as tx:
        return [message.event for message in reversed(outbox.page(tx, limit=100, **named))]


def messages(store: Store) -> list[MessageRecord]:
    with store.read() as tx:
        return outbox.page(tx, limit=100)


def move(store: Store, verb: str, job_id: str = "job-1") -> None:
    with store.write() as tx:
        catalog.move(tx, job_id, verb, now=1.0)


class TestOutbox:
    def test_a_submitted_job_tells_of_each_change(self, store: Store) -> None:
        hook(store)
        submitted(store)
        move(store, "pause")
        move(store, "pause")  # which changes nothing
        move(store, "resume")
        finish(store, leased(store), failed=[0])
        shards.compact(store, "job-1", now=1.0)
        shards.retry_failed(store, "job-1", now=2.0)
        with store.write() as tx:
            catalog.refuse(tx, "job-1", "its input changed", FailedBy.INPUT, now=3.0)
            assert catalog.fail(tx, "job-1", "its input is lost", FailedBy.INPUT, now=3.0), (
                "it had failed before"
            )
        move(store, "cancel")
        assert told(store) == [
            *("in_progress", "paused", "in_progress", "completed", "in_progress", "failed", "cancelled"),
        ]

    def test_a_batch_ends_once_its_files_are_there(self, store: Store) -> None:
        hook(store)
        batch_id = asked(store, job_id="job-1")
        finish(store, leased(store))
        with store.write() as tx:
            batches.deliver(tx, batch(store, batch_id), output="file-2", errors=None, now=5.0)
        assert told(store) == ["validating", "in_progress", "finalizing", "completed"]
        data = json.loads(messages(store)[0].body)["data"]
        assert data == {
            "id": batch_id,
            "job": "job-1",
            "project": "default",
            "status": "completed",
            "request_counts": {"total": 4, "completed": 4, "failed": 0},
            "output_file_id": "file-2",
            "error_file_id": None,
        }

    def test_a_batch_without_a_job_fails_or_is_cancelled(self, store: Store) -> None:
        hook(store)
        refused, cancelled = asked(store), asked(store)
        for _ in range(2):  # the second time changes nothing
            with store.write() as tx:
                batches.refuse(tx, refused, [InputFault(code="empty_file", message="no rows")], now=1.0)
                batches.cancel(tx, batch(store, cancelled), now=1.0)
        assert told(store) == ["validating", "validating", "failed", "cancelled"]

    def test_a_batch_that_is_cancelled_or_late_is_told_twice(self, store: Store) -> None:
        hook(store)
        for job_id in ("job-1", "job-2"):
            batch_id = asked(store, job_id=job_id)
            with store.write() as tx:
                if job_id == "job-1":
                    batches.cancel(tx, batch(store, batch_id), now=1.0)
                else:
                    catalog.set_deadline(tx, job_id, 2.0)
                    assert catalog.expire(tx, now=3.0) == ["job-2"]
            with store.write() as tx:
                batches.deliver(tx, batch(store, batch_id), output=None, errors=None, now=5.0)
        begun = ["validating", "in_progress"]
        assert told(store) == [*begun, "cancelling", "cancelled", *begun, "finalizing", "expired"]

    def test_files_that_are_asked_for_later_end_no_job_twice(self, store: Store) -> None:
        hook(store)
        submitted(store)
        finish(store, leased(store))
        with store.read() as tx:
            (found,) = batches.page(tx, "default", before=None, limit=9)
        with store.write() as tx:
            assert batches.deliver(tx, found, output="file-2", errors=None, now=5.0)
        assert told(store) == ["in_progress", "completed"]

    def test_a_job_that_is_forgiven_runs_again_and_is_told_of_once(self, store: Store) -> None:
        submitted(store)
        with store.write() as tx:
            catalog.refuse(tx, "job-1", "the requests are damaged", FailedBy.DAMAGE, now=1.0)
        hook(store)
        for _ in range(2):
            with store.write() as tx:
                catalog.forgive(tx, "job-1", now=2.0)
        assert told(store) == ["in_progress"]
        assert messages(store)[0].created_at == 2.0

    def test_what_is_rolled_back_is_not_told(self, store: Store) -> None:
        hook(store)
        submitted(store)
        with contextlib.suppress(ZeroDivisionError), store.write() as tx:
            catalog.move(tx, "job-1", "cancel", now=1.0)
            raise ZeroDivisionError
        assert told(store) == ["in_progress"]

    def test_a_hook_hears_what_it_asked_for(self, store: Store) -> None:
        theirs = hook(store, project="ann")
        ends = hook(store, events=events.ENDS)
        over = hook(store)
        with store.write() as tx:
            hooks.end(tx, over.id, hooks.REMOVED, now=0.0)
        asked(store, "ann", "job-1")
        asked(store, "ben", "job-2")
        move(store, "cancel", "job-2")
        assert told(store, hook_id=theirs.id) == ["validating", "in_progress"]
        assert told(store, hook_id=ends.id) == []
        assert told(store, hook_id=over.id) == []

    def test_without_a_hook_nothing_is_written(self, store: Store) -> None:
        submitted(store)
        assert told(store) == []

    @pytest.mark.sqlite
    def test_a_damaged_record_is_told_as_far_as_it_can_be_read(self, store: Store) -> None:
        hook(store)
        submitted(store)
        with store.write() as tx:
            tx.execute(schema.job.update().values(source="{", num_rows="many"))
            assert catalog.fail(tx, "job-1", "the record is lost", FailedBy.DAMAGE, now=1.0)
        assert told(store) == ["in_progress", "failed"]

    def test_every_function_that_changes_a_state_tells_of_it(self) -> None:
        """A new function that changes jobs or batches is found here; if it changes no state, add it."""
        silent = {
            *(
                "catalog.rebind",
                "catalog.unbind",
                "catalog.set_deadline",
                "catalog.keep_seal",
                "migrations.add_missing_causes",
                "journal.count",
                "journal.fail_misfits",
                "mending.bind",
            ),
            *("leases.begin_job", "queue.fresh", "queue.moved_by", "queue.count_retries", "choice.pass_over"),
        }
        found, tells = set(), set()
        for path in (Path(package.__file__).parent / "store").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    words = ast.unparse(node)
                    name = f"{path.stem}.{node.name}"
                    found |= {name} if "update(job)" in words or "update(batch)" in words else set()
                    tells |= {name} if "events.of_" in words else set()
        assert found - tells == silent


class TestSignature:
    def test_it_is_that_of_the_specification(self) -> None:
        made = signature.headers(
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            '{"test": 2432232314}',
            now=1614265330.7,
        )
        assert made["webhook-timestamp"] == "1614265330"
        assert made["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

    def test_each_hook_has_a_secret_of_256_random_bits(self, store: Store) -> None:
        secrets = {hook(store).secret for _ in range(2)}
        assert [len(base64.b64decode(secret.removeprefix("whsec_"))) for secret in secrets] == [32, 32]

    def test_openais_client_accepts_it(self, store: Store) -> None:
        with receiving() as receiver:
            to = hook(store, receiver.url, allow_private=True)
            submitted(store)
            Courier(store).finish(60.0)
        (got,) = receiver.got
        event = openai.OpenAI(api_key="none").webhooks.unwrap(got.body, got.headers, secret=to.secret)
        assert event.type == "batch.in_progress"  # type: ignore[comparison-overlap]
        with pytest.raises(openai.InvalidWebhookSignatureError):
            openai.OpenAI(api_key="none").webhooks.unwrap(got.body + " ", got.headers, secret=to.secret)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def to(store: Store, receiver: Receiver) -> Hook:
    return hook(store, receiver.url, allow_private=True)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TestDelivery:
    def test_a_message_is_sent_once(self, store: Store, receiver: Receiver, to: Hook) -> None:
        submitted(store)
        for _ in range(2):
            Courier(store).finish(60.0)
        (got,) = receiver.got
        (sent,) = messages(store)
        assert (got.id, got.body) == (sent.id, sent.body)
        assert got.headers["content-type"] == "application/json"
        assert got.headers["user-agent"] == f"ConServe/{package.__version__} webhooks"
        assert (sent.state, sent.attempts, sent.status, sent.error) == (MessageState.DELIVERED, 1, 204, None)

    def test_it_is_tried_for_three_days_and_then_given_up(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        receiver.answer = lambda received: (500, {})
        clock = Clock()
        courier = Courier(store, clock=clock)
        submitted(store)
        moments = []
        while messages(store)[0].state is MessageState.WAITING:
            courier.finish(60.0)
            moments.append(clock.now)
            clock.now = messages(store)[0].next_at - 0.001
            courier.finish(60.0)
            assert len(receiver.got) == len(moments), "sent before its time"
            clock.now += 0.001
        pauses = [later - one for one, later in pairwise(moments)]
        assert pauses[:3] == pytest.approx([5.0, 300.0, 1800.0])
        assert [pause / HOUR_S for pause in pauses[3:-1]] == pytest.approx([2, 5, 10, 14, 20])
        assert moments[-1] == pytest.approx(72 * HOUR_S)
        assert {got.id for got in receiver.got} == {messages(store)[0].id}
        given_up = messages(store)[0]
        assert (given_up.state, given_up.attempts) == (MessageState.GIVEN_UP, 10)
        assert given_up.error == "the receiver answered 500"

    def test_a_given_up_message_is_sent_again_under_its_id(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        submitted(store)
        (message,) = messages(store)
        with store.write() as tx:
            tx.execute(schema.message.update().values(state="given_up", attempts=10))
        done = conserve("hooks", "resend", message.id)
        assert (done.returncode, "delivered; the receiver answered 204" in done.stderr) == (0, True)
        assert receiver.got[0].id == message.id

    def test_a_receiver_may_ask_for_a_longer_pause(self) -> None:
        assert verdict(waiting(0), SendAttempt(at=10.0, status=429, error="no"), 60.0)[1] == 70.0
        assert (
            verdict(waiting(2), SendAttempt(at=10.0, status=429, error="no"), 60.0)[1] == 10.0 + PAUSES_S[2]
        )
        assert verdict(waiting(0), SendAttempt(at=0.0, status=503, error="no"), 1e7)[1] == 24 * HOUR_S
        assert verdict(waiting(0), SendAttempt(at=0.0, status=503, error="no"), inf)[1] == 24 * HOUR_S

    def test_a_receiver_that_names_its_pause_is_asked_again_behind_it(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        receiver.answer = lambda received: (429, {"Retry-After": "120"})
        submitted(store)
        courier = Courier(store, clock=Clock())
        courier.finish(60.0)
        assert (messages(store)[0].status, messages(store)[0].next_at) == (429, 120.0)
        assert (courier.delivered, courier.failed) == (0, 1)

    def test_a_receiver_may_name_the_end_of_its_pause_by_a_date(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        receiver.answer = lambda received: (503, {"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"})
        submitted(store)
        Courier(store, clock=Clock()).finish(60.0)
        assert messages(store)[0].next_at == outbox.LONGEST_WAIT_S

    @pytest.mark.parametrize(
        ("attempts", "event", "attempt", "state"),
        [
            (9, "completed", SendAttempt(at=0.0, status=299), MessageState.DELIVERED),
            (8, "completed", SendAttempt(at=0.0, status=500, error="no"), MessageState.WAITING),
            (9, "completed", SendAttempt(at=0.0, status=500, error="no"), MessageState.GIVEN_UP),
            (0, outbox.TEST, SendAttempt(at=0.0, error="no"), MessageState.GIVEN_UP),
            (9, "completed", SendAttempt(at=0.0, status=410, error="no"), MessageState.DROPPED),
        ],
    )
    def test_a_message_behind_an_attempt_waits_or_is_over(
        self, attempts: int, event: str, attempt: SendAttempt, state: MessageState
    ) -> None:
        found, next_at = verdict(waiting(attempts, event), attempt)
        assert found is state
        assert (next_at is None) is (state is not MessageState.WAITING)

    @pytest.mark.parametrize("status", [200, 299, 300, 404])
    def test_any_answer_of_the_two_hundreds_is_a_receipt_and_no_other(
        self, store: Store, receiver: Receiver, to: Hook, status: int
    ) -> None:
        receiver.answer = lambda received: (status, {})
        submitted(store)
        Courier(store).finish(60.0)
        redirect = "; redirects are not followed" if status == 300 else ""
        error = None if status < 300 else f"the receiver answered {status}{redirect}"
        assert (messages(store)[0].status, messages(store)[0].error) == (status, error)

    def test_a_message_of_a_hook_that_ends_meanwhile_is_not_sent(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        submitted(store)
        with store.write() as tx:
            (held,) = claimed(tx, owner="me", now=0.0)
            hooks.end(tx, to.id, hooks.REMOVED, now=0.0)
        courier = Courier(store, clock=Clock())
        courier.send(held)
        assert not receiver.got
        assert courier.failed == 1

    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            (httpcore.ConnectTimeout(), "ConnectTimeout"),
            (httpcore.ReadTimeout("no answer within 20 s"), "ReadTimeout: no answer within 20 s"),
            (OSError("no such\nhost"), "OSError: no such host"),
        ],
    )
    def test_an_attempt_that_breaks_is_one_line_and_is_tried_again(
        self, store: Store, to: Hook, monkeypatch: pytest.MonkeyPatch, broken: Exception, said: str
    ) -> None:
        def breaks(host: str, port: int) -> list[Any]:
            raise broken

        submitted(store)
        Courier(store, resolve=breaks, clock=Clock()).finish(60.0)
        (message,) = messages(store)
        assert (message.state, message.status, message.error) == (MessageState.WAITING, None, said)

    def test_a_message_whose_hook_is_damaged_is_given_up_in_its_time_and_told(
        self, store: Store, to: Hook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submitted(store)

        def damaged(*_: object) -> Hook:
            raise ValueError("odd\nevents")

        monkeypatch.setattr(hooks, "get", damaged)
        clock = Clock()
        courier = Courier(store, clock=clock)
        for _ in range(10):
            courier.finish(60.0)
            clock.now = messages(store)[0].next_at
        (message,) = messages(store)
        assert (message.state, message.error) == (MessageState.GIVEN_UP, "ValueError: odd events")
        assert [record.getMessage() for record in caplog.records] == [
            f"the message {message.id} to {to.id} is given up: ValueError: odd events"
        ]

    def test_a_receiver_that_is_gone_ends_its_hook(self, store: Store, receiver: Receiver, to: Hook) -> None:
        receiver.answer = lambda received: (410, {})
        submitted(store)
        Courier(store).finish(60.0)
        move(store, "cancel")
        assert [message.state for message in messages(store)] == [MessageState.DROPPED]
        assert "its receiver answered 410 Gone" in conserve("hooks", "list").stdout

    def test_redirects_are_not_followed(self, store: Store, receiver: Receiver, to: Hook) -> None:
        receiver.answer = lambda received: (307, {"location": receiver.url})
        submitted(store)
        Courier(store).finish(60.0)
        assert len(receiver.got) == 1
        assert messages(store)[0].error == "the receiver answered 307; redirects are not followed"

    def test_what_a_killed_process_held_is_sent_under_its_id(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        submitted(store)
        dead = owners.this_process().replace(":", ":9", 1)
        with store.write() as tx:
            (held,) = claimed(tx, owner=dead, now=1e9)
        Courier(store, clock=lambda: 1e9).finish(60.0)
        assert [got.id for got in receiver.got] == [held.id]

    def test_a_message_of_another_boot_is_taken_at_once_where_the_store_is_of_one_machine(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        """PostgreSQL is reached from other machines of this host's name, and one of them may be sending."""
        submitted(store)
        with store.write() as tx:
            claimed(tx, owner=of_another_boot(), now=1e9)
        Courier(store, clock=lambda: 1e9).finish(60.0)
        assert len(receiver.got) == (store.engine.dialect.name == "sqlite")

    def test_what_a_silent_machine_holds_is_sent_after_a_while(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        submitted(store)
        with store.write() as tx:
            claimed(tx, owner="elsewhere:1:2:3.4", now=0.0)
        clock = Clock()
        courier = Courier(store, clock=clock)
        clock.now = outbox.HOLD_S - 1
        courier.finish(60.0)
        assert not receiver.got
        clock.now = outbox.HOLD_S
        courier.finish(60.0)
        assert len(receiver.got) == 1

    def test_of_two_couriers_one_sends(self, store: Store, receiver: Receiver, to: Hook) -> None:
        for number in range(20):
            submitted(store, f"job-{number}")
        threads = [threading.Thread(target=Courier(store).finish, args=[60.0]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        Courier(store).finish(60.0)
        assert len({got.id for got in receiver.got}) == len(receiver.got) == 20

    def test_a_late_failure_does_not_undo_a_delivery(self, store: Store, to: Hook) -> None:
        submitted(store)
        with store.write() as tx:
            (slow,) = claimed(tx, owner="slow", now=0.0)
            (fast,) = claimed(tx, owner="fast", now=outbox.HOLD_S)
            outbox.record(tx, slow, SendAttempt(at=1.0, error="no"), state=MessageState.WAITING, next_at=9.0)
            assert outbox.get(tx, fast.id).owner == "fast"
            outbox.record(tx, fast, SendAttempt(at=1.0, status=200), state=MessageState.DELIVERED)
            outbox.record(tx, slow, SendAttempt(at=2.0, error="no"), state=MessageState.GIVEN_UP)
            assert outbox.get(tx, fast.id).state is MessageState.DELIVERED

    def test_a_message_is_not_sent_again_while_it_is_being_sent(self, store: Store, to: Hook) -> None:
        submitted(store)
        with store.write() as tx:
            (held,) = claimed(tx, owner="ann", now=0.0)
            assert outbox.holders(tx) == {"ann"}
            with pytest.raises(UsageError, match=f"the message {held.id} is being sent now"):
                outbox.again(tx, held.id, owner="ben", now=outbox.HOLD_S - 1.0)
            assert outbox.get(tx, held.id) == held
            later = outbox.again(tx, held.id, owner="ben", now=outbox.HOLD_S)
            assert (later.owner, later.held_until, later.attempts) == ("ben", 2 * outbox.HOLD_S, 0)
            outbox.record(tx, later, SendAttempt(at=1.0, error="no", status=500), state=MessageState.GIVEN_UP)
            assert outbox.holders(tx) == set()
            again = outbox.again(tx, held.id, owner="cid", now=500.0)
            assert (again.state, again.attempts, again.next_at) == (MessageState.WAITING, 0, 500.0)

    def test_messages_of_the_dead_are_free_and_those_of_others_stay_held(self, store: Store) -> None:
        for _ in range(2):
            hook(store)
        submitted(store)
        with store.write() as tx:
            first, second = outbox.turn(tx, now=0.0, limit=8)
            assert outbox.claim(tx, [first], owner="ann", now=0.0)[0].id == first
            assert outbox.claim(tx, [first], owner="ben", now=0.0) == []
            outbox.claim(tx, [second], owner="ben", now=0.0)
            assert not outbox.any_due(tx, now=1.0)
            outbox.release(tx, [])
            assert outbox.holders(tx) == {"ann", "ben"}
            outbox.release(tx, ["ann", "dead"])
            assert outbox.holders(tx) == {"ben"}
            assert outbox.any_due(tx, now=1.0)
            assert outbox.turn(tx, now=1.0, limit=8) == [first]

    def test_hooks_that_do_not_answer_come_after_one_that_does(self, store: Store) -> None:
        """Messages of the silent hooks are older, and take all places but the one that is free next."""
        slow = [hook(store, f"{EXAMPLE}/{n}") for n in range(AT_ONCE)]
        for n in range(3):
            submitted(store, f"job-{n}")
        with store.write() as tx:
            held = claimed(tx, owner="ann", now=0.0)
        assert {one.hook_id for one in held} == {one.id for one in slow}
        quick = hook(store)
        submitted(store, "job-3")
        with store.read() as tx:
            (first,) = outbox.turn(tx, now=0.0, limit=1)
            assert outbox.get(tx, first).hook_id == quick.id

    def test_a_first_attempt_comes_before_another_one(self, store: Store) -> None:
        slow, quick = hook(store, f"{EXAMPLE}/slow"), hook(store)
        submitted(store)
        with store.write() as tx:
            tx.execute(update(schema.message).where(schema.message.c.hook_id == slow.id).values(attempts=1))
            older, newer = sorted(outbox.turn(tx, now=0.0, limit=8), key=lambda one: outbox.get(tx, one).seq)
            assert outbox.get(tx, older).hook_id == slow.id
            assert outbox.turn(tx, now=0.0, limit=8) == [newer, older]
            assert outbox.get(tx, newer).hook_id == quick.id

    @pytest.mark.parametrize(
        ("next_at", "held_until", "due"),
        [
            (25 * HOUR_S, None, False),
            (25 * HOUR_S + 1.0, None, True),
            (0.0, outbox.HOLD_S + HOUR_S, False),
            (0.0, outbox.HOLD_S + HOUR_S + 1.0, True),
        ],
    )
    def test_a_time_that_is_further_off_than_any_is_of_a_clock_that_was_ahead(
        self, store: Store, next_at: float, held_until: float | None, due: bool
    ) -> None:
        hook(store)
        submitted(store)
        with store.write() as tx:
            owner = None if held_until is None else "ann"
            tx.execute(update(schema.message).values(next_at=next_at, held_until=held_until, owner=owner))
            assert outbox.any_due(tx, now=0.0) is due
            assert len(claimed(tx, owner="ben", now=0.0)) == int(due)

    def test_the_log_shows_the_newest_messages_of_a_hook_or_of_a_state(self, store: Store) -> None:
        one, two = hook(store), hook(store)
        for number in range(2):
            submitted(store, f"job-{number}")
        with store.write() as tx:
            ids = [message.id for message in outbox.page(tx, limit=9)]
            seqs = [message.seq for message in outbox.page(tx, limit=9)]
            assert seqs == sorted(seqs, reverse=True)
            assert [message.id for message in outbox.page(tx, limit=3)] == ids[:3]
            mine = outbox.page(tx, hook_id=one.id, limit=9)
            assert [message.hook_id for message in mine] == [one.id] * 2
            (held,) = outbox.claim(tx, [mine[0].id], owner="ann", now=0.0)
            outbox.record(tx, held, SendAttempt(at=7.0, status=200), state=MessageState.DELIVERED)
            (done,) = outbox.page(tx, state=MessageState.DELIVERED, limit=9)
            assert (done.id, done.tried_at, done.owner, done.held_until) == (held.id, 7.0, None, None)
            assert outbox.page(tx, state=MessageState.DELIVERED, hook_id=two.id, limit=9) == []
            assert outbox.counts(tx) == {one.id: {"waiting": 1, "delivered": 1}, two.id: {"waiting": 2}}
            assert hooks.end(tx, two.id, hooks.REMOVED, now=3.0) == 2
            assert outbox.forget(tx, before=7.0) == 2, "never tried, and made long ago"
            assert outbox.forget(tx, before=7.1) == 1
            assert [message.state for message in outbox.page(tx, limit=9)] == [MessageState.WAITING]

    def test_a_slow_receiver_does_not_hold_up_others(self, store: Store) -> None:
        slow, quick = hook(store), hook(store)
        for number in range(9):
            submitted(store, f"job-{number}")
        with store.write() as tx:
            first = claimed(tx, owner="ann", now=0.0)
            assert [m.hook_id for m in first].count(slow.id) == 2
            for message in first:
                if message.hook_id == quick.id:
                    outbox.record(tx, message, SendAttempt(at=0.0, status=200), state=MessageState.DELIVERED)
            assert {m.hook_id for m in claimed(tx, owner="ann", now=0.0)} == {quick.id}

    def test_looking_through_the_messages_that_are_due_locks_no_writer_out(
        self, store: Store, receiver: Receiver, to: Hook, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submitted(store)
        looks, turn = [], outbox.turn

        def noted(tx: Connection, **named: Any) -> list[str]:
            looks.append(tx.get_execution_options().get("read_only", False))
            return turn(tx, **named)

        monkeypatch.setattr(outbox, "turn", noted)
        Courier(store).finish(60.0)
        assert len(receiver.got) == 1
        assert looks
        assert all(looks)

    @pytest.mark.parametrize(
        ("error", "said", "traced"),
        [
            (StoreError("the disk is full"), "the disk is full", False),
            (ZeroDivisionError("one"), "a message to a hook was not sent", True),
        ],
    )
    def test_a_fault_of_one_message_ends_its_thread_alone_and_is_logged(
        self,
        store: Store,
        receiver: Receiver,
        to: Hook,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: Exception,
        said: str,
        traced: bool,
    ) -> None:
        submitted(store)
        courier = Courier(store)

        def broken(mine: MessageRecord) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(courier, "send", broken)
            courier.step()
            courier.stop()
            courier.finish(60.0)
        (record,) = caplog.records
        assert (record.getMessage(), bool(record.exc_info)) == (said, traced)
        assert not receiver.got

    @pytest.mark.parametrize(
        ("error", "said", "traced"),
        [
            (StoreError("the disk is full"), "the disk is full", False),
            (ZeroDivisionError("one"), "messages to hooks were not sent", True),
        ],
    )
    def test_a_look_for_messages_that_fails_costs_the_work_beside_it_nothing(
        self, caplog: pytest.LogCaptureFixture, error: Exception, said: str, traced: bool
    ) -> None:
        def step() -> None:
            raise error

        guarded(step)
        (record,) = caplog.records
        assert (record.getMessage(), bool(record.exc_info)) == (said, traced)

    def test_an_outage_of_the_store_is_logged_once_and_a_later_one_again(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        looks: list[int] = []

        def step(courier: Courier) -> None:
            looks.append(len(looks))
            if looks[-1] not in (3, 4):
                raise StoreError(f"the store failed: look {looks[-1]}")

        with monkeypatch.context() as patch:
            patch.setattr(Courier, "step", step)
            with sending(store, look_s=0.001):
                until(lambda: len(looks) > 8)
        said = [record.getMessage() for record in caplog.records]
        assert said == ["the store failed: look 0", "the store failed: look 5"]

    def test_another_fault_than_that_of_the_look_before_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def step() -> None:
            raise ZeroDivisionError

        assert guarded(step, guarded(step, StoreError)) is ZeroDivisionError
        assert len(caplog.records) == 1

    def test_so_many_messages_are_sent_at_a_time_and_no_more(
        self, store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(9):
            hook(store, receiver.url, allow_private=True)
        for number in range(3):
            submitted(store, f"job-{number}")
        courier, gate, at_once = Courier(store), threading.Event(), []
        send = courier.send

        def gated(mine: MessageRecord) -> None:
            gate.wait(60.0)
            send(mine)

        monkeypatch.setattr(courier, "send", gated)
        for _ in range(3):
            courier.step()
            at_once.append(len(courier._busy))
        gate.set()
        courier.finish(60.0)
        assert at_once == [AT_ONCE] * 3
        assert len(receiver.got) == len({got.id for got in receiver.got}) == 27
        assert (courier.delivered, courier.failed) == (27, 0)

    def test_messages_are_sent_beside_the_work_and_the_last_ones_at_its_end(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        with sending(store, look_s=0.001):
            submitted(store)
            until(lambda: len(receiver.got) == 1)
        with sending(store, look_s=1e6):
            submitted(store, "job-2")
            assert len(receiver.got) == 1
        assert len(receiver.got) == 2

    def test_a_receiver_that_takes_its_time_is_waited_for_no_longer_than_was_said(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        gate = threading.Event()

        def slowly(received: Received) -> tuple[int, dict[str, str]]:
            gate.wait(60.0)
            return 204, {}

        receiver.answer = slowly
        submitted(store)
        courier = Courier(store)
        courier.finish(0.0)
        assert courier.delivered == 0
        gate.set()
        courier.finish(60.0)
        assert courier.delivered == 1

    def test_a_courier_that_was_stopped_begins_no_message(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        submitted(store)
        courier = Courier(store)
        courier.stop()
        courier.finish(60.0)
        assert not receiver.got

    def test_messages_that_are_over_are_kept_for_a_month(
        self, store: Store, receiver: Receiver, to: Hook
    ) -> None:
        submitted(store)
        Courier(store, clock=Clock()).finish(60.0)
        Courier(store, clock=lambda: 29 * 24 * HOUR_S).finish(60.0)
        assert len(messages(store)) == 1
        Courier(store, clock=lambda: 31 * 24 * HOUR_S).finish(60.0)
        assert messages(store) == []

    def test_a_run_sends_what_its_end_made(
        self, store: Store, receiver: Receiver, to: Hook, tmp_path: Path
    ) -> None:
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"q": "one"}\n{"q": "two"}\n')
        assert conserve("submit", str(rows), "--prompt", "{{ q }}").returncode == 0
        assert conserve("run", "--endpoint", "fake:").returncode == 0
        kinds = [json.loads(got.body)["type"] for got in receiver.got]
        assert sorted(kinds) == ["batch.completed", "batch.in_progress"]


def waiting(attempts: int, event: str = "completed") -> MessageRecord:
    return MessageRecord(
        seq=1, id="msg_1", hook_id="hook_1", event=event, batch_id=None, job_id=None, body="{}", created_at=0.0,
        state=MessageState.WAITING, attempts=attempts, next_at=0.0, owner="ann", held_until=9.0, tried_at=None,
        status=None, error=None,
    )  # fmt: skip


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
            *("169.254.169.254", "100.64.0.1", "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
            *("192.88.99.1", "2001:1::1", "2001:1ff::1", "3fff::1", "3fff:fff::1", "4000::1"),
            *("255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::7f00:1", "fe80::1"),
            *("fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
            *("2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1"),
        ],
    )  # fmt: skip
    def test_a_private_address_is_never_sent_to(self, address: str) -> None:
        assert not is_public(ip_address(address))
        with pytest.raises(NotPublic):
            allowed([ip_address(address)], private=False)
        assert allowed([ip_address(address)], private=True)

    @pytest.mark.parametrize(
        "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2001:200::1", "64:ff9b::808:808"]
    )
    def test_a_public_one_is(self, address: str) -> None:
        assert is_public(ip_address(address))

    def test_the_connection_goes_to_the_address_that_was_checked(self) -> None:
        with receiving() as receiver:
            port = receiver.url.split(":")[2].split("/")[0]
            url = f"http://receiver.invalid:{port}/hook"
            looked_up = []

            def resolve(host: str, port: int) -> list[Any]:
                looked_up.append(host)
                return [ip_address("127.0.0.1")]

            answer = post(url, "{}", {}, private=True, context=certificates(), resolve=resolve)
            assert (answer.status, looked_up) == (204, ["receiver.invalid"])
            assert receiver.got[0].headers["host"] == f"receiver.invalid:{port}"
            with pytest.raises(NotPublic):
                post(url, "{}", {}, private=False, context=certificates(), resolve=resolve)
            assert len(receiver.got) == 1

    def test_a_name_that_turns_private_is_tried_again_and_not_reached(self, store: Store) -> None:
        hook(store, "https://rebound.example/hook")
        submitted(store)
        Courier(store, resolve=lambda host, port: [ip_address("169.254.169.254")], clock=Clock()).finish(60.0)
        (message,) = messages(store)
        assert (message.state, message.attempts, message.status) == (MessageState.WAITING, 1, None)
        assert "NotPublic" in str(message.error)

    def test_of_several_addresses_the_first_that_answers_is_used(self) -> None:
        with receiving() as receiver:
            places = [ip_address("127.0.0.2"), ip_address("127.0.0.1")]
            answer = post(
                receiver.url, "{}", {}, private=True, context=certificates(), resolve=lambda h, p: places
            )
            assert answer.status == 204
        with pytest.raises(httpcore.ConnectError):
            post(receiver.url, "{}", {}, private=True, context=certificates(), resolve=lambda h, p: places)

    @pytest.mark.parametrize(
        "url",
        [
            *("", "example.com", "ftp://example.com", "https://", "https://a b", "https://example.com:x/"),
            *("http://example.com/", "https://localhost/", "https://127.0.0.1/", "https://[fe80::1]/"),
            *("https://me:secret@example.com/", "https://exämple.com/", "https://[::1/", "https://a/\x07"),
            "https://example.com/" + "a" * 2000,
        ],
    )
    def test_a_url_to_which_nothing_would_be_sent_is_refused(self, url: str) -> None:
        with pytest.raises(UsageError):
            checked_url(url, private=False)

    def test_private_receivers_may_speak_http(self) -> None:
        for url in ("http://127.0.0.1:8080/", "https://10.0.0.1/x", "http://receiver.internal/"):
            assert checked_url(url, private=True) == url
        assert checked_url(EXAMPLE, private=False) == EXAMPLE
        longest = EXAMPLE.ljust(2000, "a")
        assert checked_url(longest, private=False) == longest

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("https://[::1/", "is no URL: "),
            ("ftp://example.com/", "is no URL; write https://HOST/PATH"),
            ("https://example.com/a b", "write it as %20"),
            ("https://me@example.com/", "has no user and no password"),
        ],
    )
    def test_what_is_no_url_is_none_for_a_private_receiver_either(self, url: str, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            checked_url(url, private=True)

    def test_an_address_needs_no_look_up(self) -> None:
        assert resolved("127.0.0.1", 80) == [ip_address("127.0.0.1")]
        assert resolved("::1", 80) == [ip_address("::1")]


class Wire(httpcore.NetworkStream):
    """A connection that notes the time that each of its steps has."""

    def __init__(self) -> None:
        self.steps: list[tuple[object, ...]] = []

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self.steps.append(("read", max_bytes, timeout))
        return b"read"

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.steps.append(("write", buffer, timeout))

    def close(self) -> None:
        self.steps.append(("close",))

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        self.steps.append(("start_tls", server_hostname, timeout))
        return self

    def get_extra_info(self, info: str) -> Any:
        return info


class TestWire:
    def test_every_step_of_an_attempt_ends_by_one_moment(self) -> None:
        wire, clock = Wire(), Clock()
        plain = TimedStream(wire, 20.0, clock)
        clock.now = 4.0
        secure = plain.start_tls(certificates(), "receiver.example", 99.0)
        clock.now = 15.0
        secure.write(b"message", 99.0)
        clock.now = 19.5
        assert secure.read(512, 99.0) == b"read"
        secure.close()
        assert wire.steps == [
            ("start_tls", "receiver.example", 16.0), ("write", b"message", 5.0), ("read", 512, 0.5), ("close",),
        ]  # fmt: skip
        assert secure.get_extra_info("socket") == "socket"
        clock.now = 20.0
        for step in (
            lambda: secure.read(512), lambda: secure.write(b""), lambda: plain.start_tls(certificates()),
        ):  # fmt: skip
            with pytest.raises(httpcore.ReadTimeout, match="no answer within 20 s"):
                step()
        assert len(wire.steps) == 4

    def test_an_attempt_has_twenty_seconds_from_its_connection_on(self) -> None:
        clock = Clock()
        with receiving() as receiver:
            port = int(receiver.url.split(":")[2].split("/")[0])
            resolve = lambda host, port: [ip_address("127.0.0.1")]  # noqa: E731
            backend = CheckedBackend(resolve, private=True, clock=clock)
            stream = backend.connect_tcp("receiver.example", port)
            clock.now = 19.9
            stream.write(b"POST /hook HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
            clock.now = 20.0
            with pytest.raises(httpcore.ReadTimeout):
                stream.read(512)
            stream.close()

    def test_a_name_of_many_dead_addresses_holds_a_thread_up_for_half_a_minute(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, tried = Clock(), list[tuple[str, float]]()

        def drop(_: object, host: str, port: int, timeout: float, *__: object) -> None:
            clock.now += min(timeout, 8.0)
            tried.append((host, timeout))
            raise httpcore.ConnectTimeout("dropped")

        monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", drop)
        addresses = [ip_address(f"192.0.2.{n}") for n in range(1, 41)]
        backend = CheckedBackend(lambda host, port: addresses, private=True, clock=clock)
        with pytest.raises(httpcore.ConnectTimeout, match="no address of dead"):
            backend.connect_tcp("dead.example", 80)
        assert tried == [(f"192.0.2.{n}", s) for n, s in enumerate((10.0, 10.0, 10.0, 6.0), 1)]
        assert clock.now < outbox.HOLD_S

    def test_messages_go_over_tcp_alone(self) -> None:
        backend = CheckedBackend(lambda host, port: [], private=True, clock=Clock())
        with pytest.raises(httpcore.UnsupportedProtocol):
            backend.connect_unix_socket("/run/receiver.sock")
        with pytest.raises(NotPublic):
            backend.connect_tcp("receiver.example", 80)


class TestCommands:
    def test_a_hook_from_its_making_to_its_end(self, store: Store, receiver: Receiver) -> None:
        made = conserve("hooks", "add", receiver.url, "--events", "expired,completed", "--allow-private")
        assert made.stdout.startswith("whsec_"), made.stderr
        (listed,) = json.loads(conserve("hooks", "list", "--json").stdout)
        assert listed["events"] == ["completed", "expired"]
        assert "secret" not in listed
        assert made.stdout.strip() not in conserve("hooks", "list").stdout
        done = conserve("hooks", "test", listed["id"])
        assert (done.returncode, receiver.got[0].id in done.stderr) == (0, True)
        assert json.loads(receiver.got[0].body)["type"] == "conserve.test"
        submitted(store)
        finish(store, leased(store))
        assert "1 message delivered, 0 not" in conserve("hooks", "deliver").stderr
        logged = json.loads(conserve("hooks", "log", "--json").stdout)
        assert [(entry["event"], entry["state"]) for entry in logged] == [
            ("completed", "delivered"),
            ("test", "delivered"),
        ]
        assert "body" not in logged[0]
        assert conserve("hooks", "remove", listed["id"]).returncode == 0
        for verb in (("test", listed["id"]), ("resend", logged[0]["id"])):
            refused = conserve("hooks", *verb)
            assert (refused.returncode, "has ended" in refused.stderr) == (2, True)

    def test_a_test_that_fails_says_why_and_is_not_tried_again(self, store: Store) -> None:
        to = hook(store, "http://127.0.0.1:9/", allow_private=True)
        done = conserve("hooks", "test", to.id)
        assert (done.returncode, "not delivered: ConnectError" in done.stderr) == (1, True)
        assert messages(store)[0].state is MessageState.GIVEN_UP
        assert "given_up" in conserve("hooks", "log", to.id, "--state", "given_up").stdout

    def test_messages_that_wait_are_dropped_with_their_hook(self, store: Store) -> None:
        to = hook(store)
        submitted(store)
        done = conserve("hooks", "remove", to.id)
        assert "1 message that waited dropped" in done.stderr
        assert messages(store)[0].state is MessageState.DROPPED

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("add", EXAMPLE, "--events", "ended"), "there is no event 'ended'"),
            (("add", "http://10.0.0.1/"), "add --allow-private"),
            (("add", EXAMPLE, "--project", "a b"), "a project is letters"),
            (("remove", "hook_1"), "there is no hook 'hook_1'"),
            (("log", "hook_1"), "there is no hook 'hook_1'"),
            (("log", "--state", "lost"), "--state is one of waiting"),
            (("resend", "msg_1"), "there is no message 'msg_1'"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, words: tuple[str, ...], said: str) -> None:
        done = conserve("hooks", *words)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr

    @pytest.mark.sqlite
    def test_the_secret_outlives_a_rebuilt_database(self, store: Store) -> None:
        to = hook(store)
        submitted(store)
        path = store.home / "store.db"
        salvaged = rebuild.salvage(path if path.exists() else next(store.home.glob("*.db")))
        assert salvaged["hook"][0]["secret"] == to.secret
        assert len(salvaged["message"]) == len(select(store, "select id from message")) == 1

"""The portal: every call that is handed to it comes to an end."""

import asyncio
import multiprocessing
import threading

import pytest

from conserve.api.portal import Pending, portal


async def nothing() -> int:
    return 7


async def fails() -> int:
    raise ValueError("wrong")


async def exits() -> int:
    raise SystemExit(3)


def test_work_that_is_cancelled_before_its_first_step_ends() -> None:
    loop = asyncio.new_event_loop()
    work = Pending(nothing(), loop)
    work.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert work.done.done()
    with pytest.raises(asyncio.CancelledError):
        work.result()


def test_work_ends_with_its_result_or_its_error() -> None:
    loop = asyncio.new_event_loop()
    good, bad, leaves = Pending(nothing(), loop), Pending(fails(), loop), Pending(exits(), loop)
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert good.result() == 7
    with pytest.raises(ValueError, match="wrong"):
        bad.result()
    with pytest.raises(SystemExit):  # which would end the loop if it left the task
        leaves.result()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_ends_well_beside_a_portal() -> None:
    assert portal.submit(nothing()).result() == 7
    child = multiprocessing.get_context("fork").Process(target=threading.active_count)
    child.start()
    child.join()
    assert child.exitcode == 0

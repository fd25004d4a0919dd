"""Gloo's threads leave the core to the rank that they work for."""

import os
import threading

import pytest

from lockstep.distributed.gloo_threads import started_as_batch_work

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_are_started_meanwhile_are_batch_work() -> None:
    assert (os.sched_getscheduler(0), policy_of_a_new_thread()) == (os.SCHED_OTHER, os.SCHED_OTHER)
    with pytest.raises(LookupError), started_as_batch_work():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
        raise LookupError
    assert (os.sched_getscheduler(0), policy_of_a_new_thread()) == (os.SCHED_OTHER, os.SCHED_OTHER)


def test_a_policy_that_the_user_has_chosen_stays() -> None:
    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with started_as_batch_work():
            found.append(os.sched_getscheduler(0))
        found.append(os.sched_getscheduler(0))

    found: list[int] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE] * 2

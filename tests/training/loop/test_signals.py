from __future__ import annotations

import signal

import pytest

from fastweights.training.loop.signals import StopOnSignal


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_decides_the_exit_status(number, status):
    told = []
    with StopOnSignal(lambda: told.append(True)) as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
    assert (stop.exit_status, told) == (status, [True])


def test_a_process_that_only_heard_of_a_signal_ends_as_by_sigterm():
    assert StopOnSignal().exit_status == 143

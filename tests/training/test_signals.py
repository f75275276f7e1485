"""Asked once, a run ends in order; asked twice, at once; and afterwards signals do what they did before."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tunewell.training.signals import Signals

WAIT = """
import sys, time
from tunewell.training.signals import Signals
with Signals() as signals:
    print("ready", flush=True)
    while not signals.asked:
        time.sleep(0.005)
    print(signals.asked, flush=True)
    time.sleep(30)
"""

CODES = [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143)]


@pytest.mark.parametrize(("name", "code"), CODES)
def test_the_first_signal_is_only_noted(name, code):
    """The step under way is finished and saved; the default would throw it away."""
    with Signals() as signals:
        assert (signals.asked, signals.exit_code) == (None, None)
        os.kill(os.getpid(), signal.Signals[name])
        assert (signals.asked, signals.exit_code) == (name, code)


@pytest.mark.parametrize(("first", "second", "code"), [("SIGTERM", "SIGTERM", 143), ("SIGUSR1", "SIGINT", 130)])
def test_the_second_signal_ends_the_process_at_once(first, second, code):
    """A person who presses Ctrl-C twice means it."""
    process = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[first])
    assert process.stdout.readline() == f"{first}\n"
    if first == second:  # at once it is the same request, come by two ways
        process.send_signal(signal.Signals[second])
        time.sleep(0.6)
        assert process.poll() is None
    process.send_signal(signal.Signals[second])
    assert process.wait(timeout=10) == code
    process.communicate()


def test_the_handlers_of_before_are_back_afterwards_even_after_an_error():
    """A notebook goes on after a run, and its Ctrl-C must work."""
    seen, of_before = [], signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(ZeroDivisionError), Signals():
            _ = 1 / 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) == of_before
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_is_taken_also_where_it_was_ignored():
    """Scripts start what they put into the background so; whoever sends one to a run means that run."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.asked == "SIGINT"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_off_the_main_thread_nothing_is_touched():
    """Python sets handlers in the main thread only; a run in a thread must still start."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with Signals() as signals:
            seen.append((signals.asked, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_a_platform_without_sigusr1_has_the_other_two(monkeypatch):
    """Windows."""
    monkeypatch.delattr(signal, "SIGUSR1")
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked == "SIGTERM"

"""Long work that Ctrl-C ends at once, although it is native code, or other threads do it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def interruptible(function: Callable[[], Result]) -> Result:
    """Returns what `function` returns, whose native code may run for long without a look at signals.

    In the main thread, which alone gets signals, it runs in another one. After KeyboardInterrupt that goes on, and
    what it makes is dropped: it must change nothing that others see.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    from concurrent.futures import Future

    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=run, name="maxsoftmax", daemon=True)
    thread.start()
    # The system may hand a signal to another thread, which does not wake this one.
    while thread.is_alive():
        thread.join(0.1)
    result: Result = made.result()
    return result

"""A process beside each rank that makes the layouts of coming batches.

::

    training thread --- boundaries ---> courier thread ---> planning process
          |                                  |  host-side index arrays      |
          '------- layout, when needed ------'<----------- layout ----------'

A process and not a thread: most of planning is Python and numpy, which hold the interpreter's lock, while the training
thread has kernels to launch. It is forked, as the workers of a data loader are, and touches neither GPUs nor the
network: it closes every file that it inherits, so that a rank that dies is seen to be dead by its peers.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PlanWorker(Generic[T]):
    """Calls ``make(*request)`` in a process of its own, one request after the other.

    Parameters
    ----------
    make : callable
        Runs in the process. What it returns is pickled.
    finish : callable
        Runs in this process, in the courier thread, on each result before anyone gets it.
    patience_s : float
        Seconds that :meth:`result` waits before it takes the process for lost.
    """

    def __init__(self, make: Callable[..., T], finish: Callable[[T], object], patience_s: float) -> None:
        self._finish, self._patience_s = finish, patience_s
        self._requests: queue.SimpleQueue[tuple[Future[T | None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lost = False
        context = multiprocessing.get_context("fork")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), name="fcp-planner", daemon=True)
        self._process.start()
        theirs.close()
        self._courier = threading.Thread(target=self._carry, name="fcp-plan-courier", daemon=True)
        self._courier.start()

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    def submit(self, *request: Any) -> Future[T | None]:
        """Have ``make(*request)`` called. The result is None where it raised, or the process is gone."""
        future: Future[T | None] = Future()
        if self._lost:
            future.set_result(None)
        else:
            self._requests.put((future, request))
        return future

    def result(self, future: Future[T | None]) -> T | None:
        """Wait for a result; None where whoever asks must do the work itself."""
        try:
            return future.result(self._patience_s)
        except TimeoutError:
            self._lose(f"did not answer for {self._patience_s:g} s")
            return None

    def close(self) -> None:
        """End the process and the thread; requests that were not served give None. May be called again."""
        self._lost = True
        self._requests.put(None)
        self._process.kill()  # a process that is stopped, as by a debugger, would not hear a politer word
        self._process.join()
        self._courier.join()

    def _carry(self) -> None:
        while (entry := self._requests.get()) is not None:
            future, request = entry
            result: T | None = None
            if not self._lost:
                try:
                    self._link.send(request)
                    result = self._link.recv()
                    if result is not None:
                        self._finish(result)
                except (EOFError, OSError):
                    self._lose("ended")
                except Exception:  # whoever needs the result makes it, and meets the error where it is heard
                    result = None
            future.set_result(result)
        self._link.close()

    def _lose(self, how: str) -> None:
        if not self._lost:
            self._lost = True
            self._process.kill()
            warnings.warn(
                f"FCP's planning process {how}; the training thread makes the plans from now on", stacklevel=3
            )


def _serve(link: Connection, make: Callable[..., object]) -> None:
    """The planning process: answer requests until the rank is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's, whose end ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _close_all_files_but(link.fileno())
    gc.freeze()  # what was there before the fork is shared memory; looking through it would copy it
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = link.recv()
            try:
                result = make(*request)
            except Exception:  # the training thread makes the same plan, and there the error is heard
                result = None
            link.send(result)


def _close_all_files_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if (descriptor := int(name)) > 2 and descriptor != kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)

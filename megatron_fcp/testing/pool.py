"""Jobs of several ranks in freshly forked processes that have everything imported already.

Importing torch and Megatron takes seconds, and neither can be reset reliably within a process. So one server process
imports them once and forks N children for every job: a job starts in milliseconds, from the same clean state each
time, and a job that goes wrong is killed without taking anything else along::

    driver (pytest) --- control socket --- server: preload(), then one fork per rank and job
        |                                     |-- rank 0 (own session, own log)
        '--- one socket per rank -------------'-- rank 1 ...

When a rank raises, dies or does not finish in time, the stacks of the ranks that still run are dumped into the report,
all are killed, and :class:`JobError` tells what every rank was doing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO, Any

__all__ = ["JobError", "Outcome", "RankFailure", "WorkerPool", "resolve"]

_LOG_TAIL = 4000  # characters of a rank's output shown in a report


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank of a finished job returned.

    Attributes
    ----------
    value : object
        Return value of the job's function.
    log : str
        Everything the rank printed (stdout and stderr).
    """

    value: Any
    log: str


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """How one rank of a failed job ended.

    Attributes
    ----------
    rank : int
    kind : str
        ``"raised"``, ``"died"`` (the process is gone), ``"stalled"`` (killed while running) or ``"finished"``.
    error : str
        ``"ValueError: ..."``-like line of a rank that raised, else empty.
    details : str
        Traceback of a rank that raised.
    log : str
        Everything the rank printed, including the stack dump of a stalled rank.
    seconds : float
        From the start of the job to the end of the rank.
    """

    rank: int
    kind: str
    error: str = ""
    details: str = ""
    log: str = ""
    seconds: float = 0.0


class JobError(RuntimeError):
    """A job in which some rank raised, died or stalled.

    Attributes
    ----------
    ranks : list of RankFailure
        One entry per rank, also for those that finished.
    """

    def __init__(self, summary: str, ranks: Sequence[RankFailure]) -> None:
        self.ranks = list(ranks)
        parts = [summary]
        for rank in self.ranks:
            parts.append(f"---- rank {rank.rank}: {rank.kind} after {rank.seconds:.1f} s {rank.error}".rstrip())
            if rank.details:
                parts.append(rank.details.rstrip())
            if rank.kind != "finished":
                parts.append(f"output of rank {rank.rank} (end):\n{rank.log[-_LOG_TAIL:].rstrip()}")
        super().__init__("\n".join(parts))

    @property
    def errors(self) -> list[str]:
        """The error lines of the ranks that raised."""
        return [rank.error for rank in self.ranks if rank.kind == "raised"]


class WorkerPool:
    """Runs jobs of up to any number of ranks; a context manager.

    Parameters
    ----------
    preload : str, optional
        ``"module:function"`` called once in the server process, to import what every job needs. It must not start
        threads: the server forks afterwards.
    environment : mapping, optional
        Environment variables of the server and all ranks, on top of this process's own.
    path : sequence of str, optional
        Folders that lead ``sys.path`` in the server and all ranks.
    """

    def __init__(
        self, preload: str | None = None, environment: dict[str, str] | None = None, path: Sequence[str] = ()
    ) -> None:
        self._preload, self._path = preload, tuple(path)
        self._environment = {"OMP_NUM_THREADS": "1", **(environment or {})}
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server; the next :meth:`run` would start a new one."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(timeout=5)
            self._server.kill()
            self._server.wait()
        self._server = self._control = None

    def run(
        self,
        function: str | Callable[[Any], Any],
        arguments: Sequence[Any],
        *,
        timeout: float = 120.0,
        grace: float = 2.0,
    ) -> list[Outcome]:
        """Call ``function(argument)`` in one fresh process per entry of `arguments`, all at the same time.

        Parameters
        ----------
        function : str or callable
            ``"module:function"``, or a function that can be imported by its module and name.
        arguments : sequence
            The argument of each rank (rank = index). Picklable, like the results.
        timeout : float, optional
            Seconds for the whole job.
        grace : float, optional
            Seconds that the other ranks get to end by themselves after the first one failed.

        Returns
        -------
        list of Outcome
            In rank order.

        Raises
        ------
        JobError
            When a rank raised, died or did not finish in time. No process of the job is left.
        """
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        job = _Job(self._start(), self._path, name, arguments)
        try:
            job.wait(timeout, grace)
            return job.outcomes()
        finally:
            job.kill()

    def _start(self) -> socket.socket:
        if self._server is not None and self._server.poll() is None:
            assert self._control is not None
            return self._control
        self.close()
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {[*self._path, *sys.path]!r}; "
            f"from megatron_fcp.testing.pool import _serve; _serve({theirs.fileno()}, {self._preload!r})"
        )
        environment = {**os.environ, **self._environment}
        self._server = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._control = ours
        return ours


class _Job:
    """The processes of one job, seen from the driver."""

    def __init__(self, control: socket.socket, path: Sequence[str], function: str, arguments: Sequence[Any]) -> None:
        self.started = time.monotonic()
        self.links: list[Connection] = []
        self.logs: list[IO[bytes]] = []
        self.pids: dict[int, int] = {}
        self.values: dict[int, Any] = {}
        self.failures: dict[int, RankFailure] = {}
        self._first_failure_at = 0.0
        for argument in arguments:
            ours, theirs = socket.socketpair()
            log = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill()
            socket.send_fds(control, [b"f"], [theirs.fileno(), log.fileno()])
            theirs.close()
            link = Connection(ours.detach())
            link.send(([*path, *sys.path], function, argument))
            self.links.append(link)
            self.logs.append(log)

    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    def _log(self, rank: int) -> str:
        # pread: the file offset is shared with the rank that writes.
        descriptor = self.logs[rank].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def _running(self) -> list[int]:
        return [r for r in range(len(self.links)) if r not in self.values and r not in self.failures]

    def wait(self, timeout: float, grace: float) -> None:
        """Collect results until all ranks ended; raise JobError as soon as the job cannot succeed any more."""
        deadline = self.started + timeout
        while running := self._running():
            if self.failures:
                deadline = min(deadline, self._first_failure_at + grace)
            ready = wait([self.links[r] for r in running], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in running:
                if self.links[rank] in ready:
                    self._receive(rank)
        if self.failures or running:
            raise self._error(timeout)

    def _receive(self, rank: int) -> None:
        kind: str
        payload: Any
        try:
            kind, payload = self.links[rank].recv()
        except (EOFError, OSError):
            kind, payload = "died", ("", "")
        if kind == "started":
            self.pids[rank] = payload
        elif kind == "finished":
            self.values[rank] = payload
        else:
            if not self.failures:
                self._first_failure_at = time.monotonic()
            self.failures[rank] = RankFailure(rank, kind, *payload, seconds=self._elapsed())

    def _error(self, timeout: float) -> JobError:
        stalled = self._running()
        for rank in stalled:
            if rank in self.pids:
                os.kill(self.pids[rank], signal.SIGUSR1)  # faulthandler writes its stacks into the log
        if stalled:
            time.sleep(0.5)
        ranks = []
        for rank in range(len(self.links)):
            kind = "finished" if rank in self.values else "stalled"
            failure = self.failures.get(rank, RankFailure(rank, kind, seconds=self._elapsed()))
            ranks.append(dataclasses.replace(failure, log=self._log(rank)))
        failed = {kind: [r.rank for r in ranks if r.kind == kind] for kind in ("raised", "died", "stalled")}
        what = "; ".join(f"{kind}: ranks {members}" for kind, members in failed.items() if members)
        late = f" (time-out {timeout:g} s)" if not self.failures else ""
        return JobError(f"job of {len(ranks)} ranks failed{late}: {what}", ranks)

    def outcomes(self) -> list[Outcome]:
        return [Outcome(self.values[rank], self._log(rank)) for rank in range(len(self.links))]

    def kill(self) -> None:
        """End every process of the job. Ranks that have reported only wait for this."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for link in self.links:
            link.close()
        for log in self.logs:
            log.close()


def resolve(name: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names.

    Raises
    ------
    ValueError
        If ``name`` has another form.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{name!r} does not name a function; write it as 'module:function'")
    return getattr(importlib.import_module(module), attribute)


def _serve(control_fd: int, preload: str | None) -> None:
    """The server: import once, then fork one rank per request until the driver is gone."""
    control = socket.socket(fileno=control_fd)
    problem = ""
    try:
        if preload is not None:
            resolve(preload)()
    except BaseException:  # every job reports it; the server's own output may be seen by nobody
        problem = traceback.format_exc()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are not waited for: let the kernel reap them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; its end ends everything
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            os._exit(0)  # nothing here needs the interpreter's slow way out
        if os.fork() == 0:
            try:
                control.close()
                _work(descriptors[0], descriptors[1], problem)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _work(link_fd: int, log_fd: int, problem: str) -> None:
    """A rank: receive the call, make it, report, and wait to be ended (another rank may still need this one)."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    # A process that the rank forks must not keep the link open: its end tells the driver that the rank died.
    os.register_at_fork(after_in_child=lambda: os.close(link_fd))
    link = Connection(link_fd)
    link.send(("started", os.getpid()))
    sys.path[:], function, argument = link.recv()
    threading.Thread(target=_end_with_driver, args=(link_fd,), daemon=True).start()
    try:
        if problem:
            raise RuntimeError(f"the pool's preload function failed\n{problem}")
        link.send(("finished", resolve(function)(argument)))
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of a rank as well
        link.send(("raised", (f"{type(error).__name__}: {error}", traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(EOFError):
        link.recv()


def _end_with_driver(link_fd: int) -> None:
    """End this rank, and what it started, when the driver is gone, whatever the rank is doing."""
    poll = select.poll()
    poll.register(link_fd, select.POLLHUP)
    poll.poll()
    os.killpg(0, signal.SIGKILL)

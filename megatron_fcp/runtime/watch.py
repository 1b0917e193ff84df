"""Finding out, across ranks, who is the cause when FCP's traffic stands still.

Nothing is exchanged while all goes well: a daemon thread per communicator looks for an alarm in the job's key-value
store a few times per time-out, one small request each. The first rank whose transfer fails raises the alarm; every
rank, whatever it is doing, then posts where it is, and the failing ranks read the board and name the cause:

- a rank that posts nothing is dead or stopped;
- a rank that posts, but does not wait in FCP while others wait for it, is stuck elsewhere.

A rank whose main thread does not come back to FCP soon after an alarm is ended by its daemon thread, so that no
survivor outlives the group it belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from torch.distributed.distributed_c10d import Store

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: ended by the watch
_ALARM = "alarm"


@dataclass(frozen=True)
class RankState:
    """Where one rank was when the alarm went off.

    Attributes
    ----------
    rank : int
        In the group.
    doing : {"waits", "busy"}
        Whether it waits for other ranks in FCP, or does something else.
    position : str
        Its last place in FCP.
    waits_for : list of int
        Ranks in the group.
    transfer : str
        Such as "receive from rank 3".
    seconds : float
        For how long.
    lost : list of int
        Peers whose connection broke.
    note : str
        What the caller of the communicator wants to be known, such as its batch.
    """

    rank: int
    doing: str
    position: str
    waits_for: list[int] = field(default_factory=list)
    transfer: str = ""
    seconds: float = 0.0
    lost: list[int] = field(default_factory=list)
    note: str = ""

    def __str__(self) -> str:
        if self.doing == "waits":
            text = f"waits to {self.transfer} for {self.seconds:.1f} s in {self.position}"
        else:
            text = f"is outside FCP's transfers for {self.seconds:.1f} s, after {self.position}"
        if self.lost:
            text += f"; lost its connection to {name_ranks(self.lost)}"
        return text + (f"; {self.note}" if self.note else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1 and 2", "ranks 0, 1 and 4"."""
    names = [str(r) for r in ranks]
    if len(names) <= 1:
        return f"rank {names[0]}" if names else "no rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def explain(states: dict[int, RankState], global_ranks: Sequence[int]) -> str:
    """The cause in the first lines, then where every rank is.

    Parameters
    ----------
    states : dict
        By rank in the group; ranks that did not post are missing.
    global_ranks : sequence of int
        Global rank of each rank of the group.
    """
    size = len(global_ranks)
    silent = [r for r in range(size) if r not in states]
    lost = {r for s in states.values() for r in s.lost}
    lines: list[str] = []
    gone = [r for r in silent if r in lost]
    mute = [r for r in silent if r not in lost]
    if gone:
        lines.append(f"cause: {name_ranks(gone)} died (connection closed, no sign of life): killed, crashed or ended")
    if mute:
        lines.append(f"cause: {name_ranks(mute)} gave no sign of life: stopped, hung or cut off")
    busy = _busy(states) if not silent else []
    if busy:
        lines.append(f"cause: {name_ranks(busy)} did not come, being busy elsewhere while others wait")
    if not lines:
        lines.append(
            "cause: every rank is alive and waits for another one: they do not execute the same plan, "
            "or not the same number of layers"
        )
    for r, global_rank in enumerate(global_ranks):
        name = f"rank {r}" if r == global_rank else f"rank {r} (global rank {global_rank})"
        lines.append(f"  {name} " + (str(states[r]) if r in states else "gave no sign of life"))
    return "\n".join(lines)


def _busy(states: dict[int, RankState]) -> list[int]:
    """Ranks that others wait for and that have been elsewhere for long; not those merely between two transfers."""
    awaited = {r for s in states.values() for r in s.waits_for}
    elsewhere = {r: s.seconds for r, s in states.items() if s.doing == "busy" and r in awaited}
    return [r for r, seconds in sorted(elsewhere.items()) if 2 * seconds >= max(elsewhere.values())]


class Board:
    """States of all ranks in the job's store; every operation survives the loss of the store.

    Parameters
    ----------
    store : torch.distributed.Store
        Shared by the ranks; none of its blocking calls is used.
    rank, size : int
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lock = threading.Lock()
        self.reachable = True

    def _try(self, call: Callable[[], object]) -> object:
        with self._lock:
            try:
                return call()
            except Exception:  # the store's host may be the very rank that died
                self.reachable = False
                return None

    def post(self, state: RankState) -> None:
        """Publish this rank's state."""
        text = json.dumps(asdict(state))
        self._try(lambda: self._store.set(f"state/{self._rank}", text))

    def raise_alarm(self) -> None:
        """Ask every rank to post its state."""
        self._try(lambda: self._store.set(_ALARM, "1"))

    def alarm(self) -> bool:
        """Whether some rank has raised the alarm."""
        return bool(self._try(lambda: self._store.check([_ALARM])))

    def collect(self, seconds: float) -> dict[int, RankState]:
        """States posted within ``seconds``, returning early when all are there."""
        states: dict[int, RankState] = {}
        deadline = time.monotonic() + seconds
        while self.reachable:
            for rank in [r for r in range(self._size) if r not in states]:
                key = f"state/{rank}"
                if self._try(lambda key=key: self._store.check([key])):
                    text = self._try(lambda key=key: self._store.get(key))
                    if isinstance(text, bytes):
                        states[rank] = RankState(**json.loads(text))
            if len(states) == self._size or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return states


class Watch:
    """The daemon thread of one communicator.

    Parameters
    ----------
    board : Board
    state : callable
        Gives this rank's :class:`RankState` now, None when its communicator is gone.
    overdue : callable
        Gives a description of a transfer that is late without anyone waiting for it on the host (GPU), else None.
    interval_s : float
        Between looks at the board.
    grace_s : float
        Seconds that the main thread gets to fail by itself after an alarm.
    name : str
        Of the group, for reports.
    global_ranks : sequence of int
    """

    def __init__(
        self,
        board: Board,
        state: Callable[[], RankState | None],
        overdue: Callable[[], str | None],
        *,
        interval_s: float,
        grace_s: float,
        name: str,
        global_ranks: Sequence[int],
    ) -> None:
        self._board, self._state, self._overdue = board, state, overdue
        self._interval, self._grace, self._name, self._global_ranks = interval_s, grace_s, name, global_ranks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch of {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: the main thread has failed by itself, or the communicator is closed."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)  # else it may be inside the store's C++ when the interpreter ends

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            late = self._overdue()
            if late is None and not self._board.alarm():
                if not self._board.reachable:
                    return
                continue
            state = self._state()
            if state is None:
                return
            self._board.post(state)
            if late is not None:
                self._board.raise_alarm()
            self._end(late)
            return

    def _end(self, late: str | None) -> None:
        if self._stop.wait(self._grace):
            return
        states = self._board.collect(0.0)
        reason = late or "another rank reports that FCP's traffic stands still"
        report = f"FCP group {self._name}: {reason}; this process ends\n{explain(states, self._global_ranks)}\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(report)
            sys.stderr.flush()
        os._exit(EXIT_CODE)

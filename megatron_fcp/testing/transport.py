"""A transport without processes: all ranks of a plan in one thread, under the strictest rules a network could have.

Every rank posts its exchanges on one queue (one communicator, one stream), and only the head of a queue moves. A
transfer happens when the heads of both queues name it: a send blocks until it is received (a *rendezvous*), a group of
sends and receives is done when all of them are. With a ``window`` of 1 a rank waits after each exchange; without one it
runs ahead until it needs data, and transfers happen as late as they can, so that a buffer that is dropped, changed or
read too early shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_fcp.plan.program import Exchange, Transfer

Array = NDArray[np.float64]
Views = tuple[Array, ...]  # one view per segment


class Deadlock(AssertionError):
    """No rank can go on; says where each one stands."""


@dataclass
class Posted:
    """An exchange on a rank's queue, with the memory that its transfers touch."""

    exchange: Exchange
    sends: dict[int, Views]
    recvs: dict[int, Views]

    @property
    def name(self) -> tuple[str, int]:
        """What both sides must agree on."""
        return self.exchange.kind, self.exchange.round


Wait = int  # number of a rank's exchanges that must be done before it goes on


@dataclass
class Port:
    """One rank's end of the network."""

    rank: int
    window: int | None
    queue: deque[Posted] = field(default_factory=deque)
    posted: int = 0
    done: int = 0

    def post(
        self, exchange: Exchange, send: Callable[[Transfer], Views], recv: Callable[[Transfer], Views]
    ) -> Generator[Wait, None, int]:
        """Queue ``exchange`` and return how many exchanges must be done before it is done."""
        for transfers in (exchange.sends, exchange.recvs):
            peers = [t.peer for t in transfers]
            assert len({self.rank, *peers}) == 1 + len(peers), f"rank {self.rank} meets itself or a peer twice: {peers}"
        sends = {t.peer: send(t) for t in exchange.sends}
        recvs = {t.peer: recv(t) for t in exchange.recvs}
        self.queue.append(Posted(exchange, sends, recvs))
        self.posted += 1
        if self.window is not None:
            yield self.posted - self.window + 1
        return self.posted


class Network:
    """Runs ranks, given as generators that yield what they wait for, until all are done or none can go on."""

    def __init__(self, cp_size: int, window: int | None) -> None:
        self.ports = [Port(rank, window) for rank in range(cp_size)]

    def run(self, ranks: list[Generator[Wait, None, None]]) -> None:
        """Drive ``ranks`` to their ends.

        Raises
        ------
        Deadlock
            If no rank can go on, or a rank ends with transfers under way.
        AssertionError
            If the two sides of a transfer list different segment lengths.
        """
        waits: list[int | None] = [0] * len(ranks)  # None: the rank is through
        while True:
            for rank, port in enumerate(self.ports):
                while (wait := waits[rank]) is not None and port.done >= wait:
                    waits[rank] = next(ranks[rank], None)
            if not self._deliver_one():
                break
        if any(wait is not None for wait in waits) or any(port.queue for port in self.ports):
            raise Deadlock("no rank can go on\n" + "\n".join(map(self._where, self.ports)))

    def _deliver_one(self) -> bool:
        """Carry out the first transfer whose two ends are both at the head of their queues."""
        for port in self.ports:
            if port.queue and not port.queue[0].sends and not port.queue[0].recvs:
                self._pop(port)
                return True
            for peer in port.queue[0].sends if port.queue else ():
                other = self.ports[peer]
                if other.queue and other.queue[0].name == port.queue[0].name and port.rank in other.queue[0].recvs:
                    _copy(port, other)
                    for end in (port, other):
                        if not end.queue[0].sends and not end.queue[0].recvs:
                            self._pop(end)
                    return True
        return False

    @staticmethod
    def _pop(port: Port) -> None:
        port.queue.popleft()
        port.done += 1

    @staticmethod
    def _where(port: Port) -> str:
        if not port.queue:
            return f"rank {port.rank}: through, or waits for data that nobody posted"
        head = port.queue[0]
        return f"rank {port.rank}: {head.name}, still to send to {[*head.sends]}, to receive from {[*head.recvs]}"


def _copy(sender: Port, receiver: Port) -> None:
    source = sender.queue[0].sends.pop(receiver.rank)
    target = receiver.queue[0].recvs.pop(sender.rank)
    lengths = [len(view) for view in source], [len(view) for view in target]
    assert lengths[0] == lengths[1], (
        f"{sender.queue[0].name}: rank {sender.rank} sends segments of {lengths[0]} tokens, "
        f"rank {receiver.rank} expects {lengths[1]}"
    )
    for s, t in zip(source, target):
        t[...] = s

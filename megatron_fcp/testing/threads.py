"""Ranks as threads of one process, over transports stricter than any real one.

``rendezvous``: posting a round blocks until everything that the rank sends in it has been received, and data is read
from the sender's tensor at that moment. A plan that needs any buffering in the transport deadlocks here.

``eager``: a send is done at once, from a copy.

Either way a receive may arrive as late as the moment at which it is waited for.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from megatron_fcp.runtime.transport import Message, Position

T = TypeVar("T")
Mode = Literal["rendezvous", "eager"]


class Deadlock(AssertionError):
    """The ranks wait for each other; tells where each one is."""


@dataclass(eq=False)
class _Half:
    """One side of a message."""

    tensor: torch.Tensor
    done: bool = False


@dataclass
class _Channel:
    """Messages of one ordered pair of ranks that have found no partner yet."""

    sends: deque[_Half] = field(default_factory=deque)
    recvs: deque[_Half] = field(default_factory=deque)


class ThreadGroup:
    """What the transports of one group share.

    Parameters
    ----------
    size : int
    mode : {"rendezvous", "eager"}
    timeout_s : float
        A wait longer than this is a deadlock.
    """

    def __init__(self, size: int, mode: Mode = "rendezvous", timeout_s: float = 20.0) -> None:
        self.size, self.mode, self.timeout_s = size, mode, timeout_s
        self.changed = threading.Condition()
        self.channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.transports = [ThreadTransport(self, rank) for rank in range(size)]
        self.broken: BaseException | None = None

    def match(self, src: int, dst: int) -> None:
        """Pair off sends and receives; called with the lock held."""
        channel = self.channels[src, dst]
        while channel.sends and channel.recvs:
            send, recv = channel.sends.popleft(), channel.recvs.popleft()
            if send.tensor.shape != recv.tensor.shape or send.tensor.dtype != recv.tensor.dtype:
                raise AssertionError(
                    f"rank {src} sends {tuple(send.tensor.shape)} {send.tensor.dtype} where rank {dst} expects "
                    f"{tuple(recv.tensor.shape)} {recv.tensor.dtype}"
                )
            recv.tensor.copy_(send.tensor)
            send.done = recv.done = True

    def wait(self, halves: Sequence[_Half]) -> None:
        """Block until all ``halves`` have found their partners; called with the lock held."""
        deadline = time.monotonic() + self.timeout_s
        while not all(half.done for half in halves):
            if self.broken is not None:
                raise RuntimeError("another rank failed") from self.broken
            if not self.changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                places = "\n".join(f"  rank {t.rank}: {t.position}" for t in self.transports)
                self.broken = Deadlock(f"no progress for {self.timeout_s:g} s\n{places}")
                self.changed.notify_all()
                raise self.broken

    def fail(self, error: BaseException) -> None:
        """Wake everyone up: a rank has failed."""
        with self.changed:
            self.broken = self.broken or error
            self.changed.notify_all()


class ThreadTransport:
    """One rank's end of a :class:`ThreadGroup`; a :class:`megatron_fcp.runtime.transport.Transport`."""

    in_order = False

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.position = Position()
        self.rounds = self.sent_elements = 0

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> _ThreadRound:
        """Start a round; in rendezvous mode returns only once all sends were received."""
        group = self.group
        self.rounds += 1
        self.sent_elements += sum(tensor.numel() for _, tensor in sends)
        buffered = group.mode == "eager"
        with group.changed:
            sent, received = [], []
            for peer, tensor in recvs:
                assert tensor.is_contiguous()
                received.append(_Half(tensor.detach()))
                group.channels[peer, self.rank].recvs.append(received[-1])
            for peer, tensor in sends:
                assert tensor.is_contiguous()
                sent.append(_Half(tensor.detach().clone() if buffered else tensor.detach()))
                group.channels[self.rank, peer].sends.append(sent[-1])
            for peer in sorted({peer for peer, _ in sends}):
                group.match(self.rank, peer)
            for peer in sorted({peer for peer, _ in recvs}):
                group.match(peer, self.rank)
            group.changed.notify_all()
            if not buffered:
                group.wait(sent)
        return _ThreadRound(group, [] if buffered else sent, received)


class _ThreadRound:
    def __init__(self, group: ThreadGroup, sent: list[_Half], received: list[_Half]) -> None:
        self._group, self._sent, self._received = group, sent, received

    def wait_recvs(self) -> None:
        with self._group.changed:
            self._group.wait(self._received)
        self._received = []

    def wait(self) -> None:
        self.wait_recvs()
        with self._group.changed:
            self._group.wait(self._sent)
        self._sent = []


def run_ranks(
    size: int, function: Callable[[ThreadTransport], T], *, mode: Mode = "rendezvous", timeout_s: float = 20.0
) -> list[T]:
    """Call ``function(transport)`` on ``size`` ranks at once; results in rank order.

    Raises
    ------
    Deadlock
        If the ranks wait for each other.
    Exception
        The first failure of a rank.
    """
    group = ThreadGroup(size, mode, timeout_s)
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = function(group.transports[rank])
        except BaseException as error:
            group.fail(error)

    if size == 1:
        return [function(group.transports[0])]
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.broken is not None:
        raise group.broken
    return results

"""Ranks as threads on one device, transfers as copies on streams: the event protocol of the NCCL path without NCCL.

A round's copies run on the receiver's own transfer stream, once both sides' compute streams have done what they were
given before the round was posted; waiting for it makes a compute stream wait, never the host. What a plan's buffers get
wrong between streams (read too early, overwritten or freed too soon) shows when a stream is made to sleep. On the CPU
there are no streams and copies happen at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from megatron_fcp.runtime.transport import Message, Position

T = TypeVar("T")
PAIR_TIMEOUT_S = 60.0


@dataclass(eq=False)
class _Side:
    """One side of a message: its tensor, when it may be touched, and when the copy is through."""

    tensor: torch.Tensor
    ready: Any
    stream: Any
    copied: threading.Event = field(default_factory=threading.Event)
    done: Any = None


class StreamGroup:
    """Transports of ``size`` ranks on ``device``.

    Parameters
    ----------
    size : int
    device : torch.device or str
    sleep : callable, optional
        Called with (rank, "compute" or "transfer") while that stream is current, before each of its rounds; makes it
        sleep to provoke hazards.
    """

    def __init__(self, size: int, device: torch.device | str, sleep: Callable[[int, str], None] | None = None) -> None:
        self.size, self.device, self.sleep = size, torch.device(device), sleep
        self.lock = threading.Lock()
        self.sends: dict[tuple[int, int], deque[_Side]] = defaultdict(deque)
        self.recvs: dict[tuple[int, int], deque[_Side]] = defaultdict(deque)

    def run(self, function: Callable[[StreamTransport], T]) -> list[T]:
        """Call ``function(transport)`` on all ranks, each in a thread with its own compute stream; results by rank."""
        results: list[Any] = [None] * self.size
        failures: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream(self.device)) if self._cuda else nullcontext():
                    results[rank] = function(StreamTransport(self, rank))
                    if self._cuda:
                        torch.cuda.current_stream(self.device).synchronize()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def match(self, src: int, dst: int) -> None:
        """Copy what both sides of a pair have posted; called with the lock held."""
        sends, recvs = self.sends[src, dst], self.recvs[src, dst]
        while sends and recvs:
            send, recv = sends.popleft(), recvs.popleft()
            if self._cuda:
                with torch.cuda.stream(recv.stream):
                    recv.stream.wait_event(send.ready)
                    recv.stream.wait_event(recv.ready)
                    recv.tensor.copy_(send.tensor)
                    send.done = recv.done = torch.cuda.Event()
                    recv.done.record()
            else:
                recv.tensor.copy_(send.tensor)
            send.copied.set()
            recv.copied.set()


class StreamTransport:
    """One rank's end; a :class:`megatron_fcp.runtime.transport.Transport`."""

    in_order = False  # a message leaves once the compute stream was done, whatever comes in meanwhile

    def __init__(self, group: StreamGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.position = Position()
        self._stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> _StreamRound:
        """Start a round."""
        group, ready = self.group, None
        if group.sleep is not None:
            group.sleep(self.rank, "compute")
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(group.device))
            with torch.cuda.stream(self._stream):
                if group.sleep is not None:
                    group.sleep(self.rank, "transfer")
        out = [(peer, _Side(tensor.detach(), ready, self._stream)) for peer, tensor in sends]
        into = [(peer, _Side(tensor.detach(), ready, self._stream)) for peer, tensor in recvs]
        with group.lock:
            for peer, side in out:
                group.sends[self.rank, peer].append(side)
            for peer, side in into:
                group.recvs[peer, self.rank].append(side)
            for peer in sorted({p for p, _ in out}):
                group.match(self.rank, peer)
            for peer in sorted({p for p, _ in into}):
                group.match(peer, self.rank)
        return _StreamRound(group.device, [s for _, s in out], [s for _, s in into])


class _StreamRound:
    def __init__(self, device: torch.device, sent: list[_Side], received: list[_Side]) -> None:
        self._device, self._sent, self._received = device, sent, received

    def wait_recvs(self) -> None:
        self._wait(self._received)

    def wait(self) -> None:
        self._wait(self._received)
        self._wait(self._sent)

    def _wait(self, sides: list[_Side]) -> None:
        """The host waits until the copy is issued, the compute stream until it is through."""
        for side in sides:
            assert side.copied.wait(PAIR_TIMEOUT_S), "the other side of a transfer was never posted"
            if side.done is not None:
                torch.cuda.current_stream(self._device).wait_event(side.done)
        sides.clear()

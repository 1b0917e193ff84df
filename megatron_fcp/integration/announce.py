"""Boundaries of coming batches for the ranks that read no data.

Only tensor-parallel rank 0 has a data loader; the others learn of a batch when Megatron broadcasts it, which is when
its plan is needed. So rank 0 tells them what it has read ahead, once per batch, over a host-side group of its own and
from threads: nobody's training waits for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_fcp.integration.layouts import Boundaries
from megatron_fcp.plan.arrays import IntArray, frozen


class Announcer:
    """One tensor-parallel group's announcements. All its ranks make it, and take part once per batch, in one order.

    Parameters
    ----------
    ranks : sequence of int
        Global ranks of the group; the first one tells, the others hear.
    hear : callable
        Called in a thread for each thing announced.
    timeout_s : float
    """

    def __init__(self, ranks: Sequence[int], hear: Callable[[Boundaries], object], timeout_s: float) -> None:
        self._source, self._hear = ranks[0], hear
        self._timeout_s = timeout_s
        self._tells = dist.get_rank() == ranks[0]
        group = dist.new_group(
            list(ranks),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,
            group_desc="FCP boundaries of coming batches",
        )
        assert isinstance(group, dist.ProcessGroup), f"global rank {dist.get_rank()} is not one of {list(ranks)}"
        self._group = group
        self._turns: queue.SimpleQueue[tuple[Future[bool], IntArray] | None] = queue.SimpleQueue()
        self._last: Future[bool] | None = None
        threading.Thread(target=self._run, name="fcp-announcements", daemon=True).start()

    def take_turn(self, boundaries: Sequence[Boundaries] = ()) -> None:
        """Announce, or hear, what was read since the last turn; returns at once."""
        self._last = Future()
        self._turns.put((self._last, packed(boundaries)))

    def settle(self) -> None:
        """Wait until everything announced so far has been heard, or cannot be."""
        if self._last is not None:
            try:
                self._last.result(self._timeout_s)
            except TimeoutError:
                self._last = None

    def close(self) -> None:
        """End the thread after the turns that were taken."""
        self._turns.put(None)

    def _run(self) -> None:
        works = True
        while (turn := self._turns.get()) is not None:
            done, message = turn
            try:
                if works:
                    self._exchange(message)
            except RuntimeError:  # a rank is gone; whoever needs it says so. Plans are made without announcements
                works = False
            done.set_result(works)

    def _exchange(self, message: IntArray) -> None:
        size = torch.tensor([message.size])
        dist.broadcast(size, self._source, group=self._group)
        if not int(size):
            return
        content = torch.from_numpy(message.copy()) if self._tells else torch.empty(int(size), dtype=torch.int64)
        dist.broadcast(content, self._source, group=self._group)
        if not self._tells:
            for boundaries in unpacked(frozen(content.numpy())):
                self._hear(boundaries)


def packed(boundaries: Sequence[Boundaries]) -> IntArray:
    """Boundaries as one array: for each the number of offsets, of tokens, whether it is plain, and the offsets."""
    parts = [np.array(part) for b in boundaries for part in ([b.offsets.size, b.num_tokens, int(b.plain)], b.offsets)]
    return frozen(np.concatenate(parts)) if parts else frozen([])


def unpacked(message: IntArray) -> list[Boundaries]:
    """The reverse of :func:`packed`."""
    out: list[Boundaries] = []
    at = 0
    while at < message.size:
        size, num_tokens, plain = message[at : at + 3].tolist()
        out.append(Boundaries(frozen(message[at + 3 : at + 3 + size]), num_tokens, bool(plain)))
        at += 3 + size
    return out

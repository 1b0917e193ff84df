"""What all ranks do in a pass, as one list of operations, and when each of them happens.

Plans and peers alike come down to this: kernel calls occupy a rank's compute, transfers occupy a sender's and a
receiver's link of their tier, and an operation starts once its resources are free *in the order of the list* and what
it depends on is done. A ring's slivers, a collective and a block's round trip need nothing more general::

    compute 0 |==== local ====|== stage 1 ==|
    0 -> 1         |-- KV --|                      occupies send[0] and recv[1] of its tier
    compute 1 |== local ==|   |== stage 1 ==|      depends on the transfer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from megatron_fcp.plan.arrays import FloatArray, IntArray
from megatron_fcp.plan.jit import njit

COMPUTE, MESSAGE, COLLECTIVE, JOIN = range(4)
KINDS = ("compute", "message", "collective", "join")


@dataclass(frozen=True)
class Program:
    """Operations of all ranks in an order that every resource can follow.

    Attributes
    ----------
    num_ranks : int
    kind : IntArray, shape [num_ops]
        ``COMPUTE`` (``src == dst``), ``MESSAGE``, ``COLLECTIVE`` (``src == dst``; both links of its tier) or ``JOIN``
        (no resource: waits for what it depends on).
    src, dst, tier : IntArray, shape [num_ops]
        Tier 0 lies inside a node, 1 between nodes.
    seconds : FloatArray, shape [num_ops]
    size : IntArray, shape [num_ops]
        Bytes that travel.
    stage, round : IntArray, shape [num_ops]
        Labels for pictures, -1 where they mean nothing.
    dep_ptr, dep : IntArray, shapes [num_ops + 1], [num_deps]
        Operation ``i`` starts after ``dep[dep_ptr[i]:dep_ptr[i + 1]]``, all of which come earlier in the list.
    """

    num_ranks: int
    kind: IntArray
    src: IntArray
    dst: IntArray
    tier: IntArray
    seconds: FloatArray
    size: IntArray
    stage: IntArray
    round: IntArray
    dep_ptr: IntArray
    dep: IntArray

    def __len__(self) -> int:
        return self.kind.size

    def run(self) -> Timeline:
        """Simulate."""
        n = self.num_ranks
        compute, moves = self.kind == COMPUTE, (self.kind == MESSAGE) | (self.kind == COLLECTIVE)
        first = np.where(compute, self.src, np.where(moves, n * (1 + self.tier) + self.src, -1))
        second = np.where(moves, n * (3 + self.tier) + self.dst, -1)
        start, end = _run(first, second, self.seconds, self.dep_ptr, self.dep, 5 * n)
        return Timeline(self, start, end)


@dataclass(frozen=True)
class Timeline:
    """When each operation of ``program`` runs; seconds."""

    program: Program
    start: FloatArray
    end: FloatArray

    @property
    def makespan(self) -> float:
        """End of the last operation."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def compute(self) -> FloatArray:
        """Kernel seconds of each rank, shape [num_ranks]."""
        p = self.program
        mine = p.kind == COMPUTE
        return np.bincount(p.src[mine], p.seconds[mine], minlength=p.num_ranks).astype(np.float64)

    @cached_property
    def finish(self) -> FloatArray:
        """When each rank is done, shape [num_ranks]."""
        out = np.zeros(self.program.num_ranks)
        np.maximum.at(out, self.program.dst, self.end)
        return out

    def link_seconds(self, tier: int, *, sends: bool) -> FloatArray:
        """Seconds that each rank's link of ``tier`` is busy in one direction, shape [num_ranks]."""
        p = self.program
        used = ((p.kind == MESSAGE) | (p.kind == COLLECTIVE)) & (p.tier == tier)
        busy = np.bincount((p.src if sends else p.dst)[used], p.seconds[used], minlength=p.num_ranks)
        return busy.astype(np.float64)

    def bytes_moved(self, tier: int, *, sends: bool) -> IntArray:
        """Bytes that each rank sends or receives on ``tier``, shape [num_ranks]."""
        p = self.program
        used = p.tier == tier
        out = np.zeros(p.num_ranks, dtype=np.int64)
        np.add.at(out, (p.src if sends else p.dst)[used], p.size[used])
        return out

    @property
    def imbalance(self) -> float:
        """Heaviest rank's kernel time over the mean."""
        mean = float(self.compute.mean())
        return float(self.compute.max()) / mean if mean else 1.0


@dataclass
class Builder:
    """Collects operations in order; every method returns the numbers of what it added."""

    num_ranks: int
    ranks_per_node: int
    _columns: list[tuple[FloatArray | IntArray, ...]] = field(default_factory=list)
    _deps: list[tuple[IntArray, IntArray]] = field(default_factory=list)
    _count: int = 0

    def tier(self, src: ArrayLike, dst: ArrayLike) -> IntArray:
        """Tier of a transfer between two ranks."""
        return (np.asarray(src) // self.ranks_per_node != np.asarray(dst) // self.ranks_per_node).astype(np.int64)

    def add(
        self, kind: ArrayLike, src: ArrayLike, dst: ArrayLike, seconds: ArrayLike, *, tier: ArrayLike = 0,
        size: ArrayLike = 0, stage: ArrayLike = -1, round: ArrayLike = -1,
    ) -> IntArray:  # fmt: skip
        """Add operations; arguments broadcast against each other."""
        parts = np.broadcast_arrays(np.atleast_1d(src), dst, tier, size, stage, round, kind, seconds)
        count = parts[0].size
        integers = [np.asarray(p, dtype=np.int64).ravel() for p in parts[:-1]]
        self._columns.append((*integers, np.asarray(parts[-1], dtype=np.float64).ravel()))
        self._count += count
        return np.arange(self._count - count, self._count)

    def compute(self, rank: ArrayLike, seconds: ArrayLike, *, stage: ArrayLike = 0) -> IntArray:
        """Add kernel calls, one per rank."""
        return self.add(COMPUTE, rank, rank, seconds, stage=stage)

    def message(
        self, src: ArrayLike, dst: ArrayLike, seconds: ArrayLike, size: ArrayLike, *, stage: ArrayLike = -1,
        round: ArrayLike = -1,
    ) -> IntArray:  # fmt: skip
        """Add point-to-point transfers."""
        return self.add(MESSAGE, src, dst, seconds, tier=self.tier(src, dst), size=size, stage=stage, round=round)

    def collective(self, rank: ArrayLike, tier: int, seconds: ArrayLike, size: ArrayLike) -> IntArray:
        """Add one rank's share of a collective."""
        return self.add(COLLECTIVE, rank, rank, seconds, tier=tier, size=size)

    def join(self, after: IntArray) -> IntArray:
        """Add one operation that ends when all of ``after`` have."""
        out = self.add(JOIN, 0, 0, 0.0)
        self.depend(out[0], after)
        return out

    def depend(self, ops: ArrayLike, on: ArrayLike) -> None:
        """Let ``ops`` start only after ``on``; the two broadcast, negative ``on`` mean nothing."""
        op, dep = (np.asarray(a, dtype=np.int64).ravel() for a in np.broadcast_arrays(ops, on))
        keep = dep >= 0
        assert (dep[keep] < op[keep]).all(), "an operation must come after what it depends on"
        self._deps.append((op[keep], dep[keep]))

    def build(self) -> Program:
        """The finished program."""
        if not self._columns:
            self.add(JOIN, 0, 0, 0.0)
        src, dst, tier, size, stage, round_, kind, seconds = (np.concatenate(c) for c in zip(*self._columns))
        op = np.concatenate([o for o, _ in self._deps] or [np.zeros(0, np.int64)])
        dep = np.concatenate([d for _, d in self._deps] or [np.zeros(0, np.int64)])
        order = np.argsort(op, kind="stable")
        ptr = np.searchsorted(op[order], np.arange(self._count + 1))
        return Program(self.num_ranks, kind, src, dst, tier, seconds, size, stage, round_, ptr, dep[order])


@njit(cache=True)
def _run(
    first: IntArray, second: IntArray, seconds: FloatArray, dep_ptr: IntArray, dep: IntArray, resources: int
) -> tuple[FloatArray, FloatArray]:
    free = np.zeros(resources)
    start = np.zeros(seconds.size)
    end = np.zeros(seconds.size)
    for i in range(seconds.size):
        begin = 0.0
        if first[i] >= 0:
            begin = free[first[i]]
        if second[i] >= 0:
            begin = max(begin, free[second[i]])
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            begin = max(begin, end[dep[k]])
        start[i] = begin
        end[i] = begin + seconds[i]
        if first[i] >= 0:
            free[first[i]] = end[i]
        if second[i] >= 0:
            free[second[i]] = end[i]
    return start, end

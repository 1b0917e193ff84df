"""One rank's kernels on one device, without the other ranks: real work lists and shapes, invented KV.

The passes are those of :mod:`megatron_fcp.runtime.attention`; only the transport is gone, so what is timed is what a
rank of the real cluster computes: kernels, merges and the sums of gradients, stage by stage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fcp.plan.arrays import FloatArray
from megatron_fcp.plan.rank_plan import RankPlan
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels.base import Kernel
from megatron_fcp.runtime.transport import Message, Position


@dataclass(frozen=True)
class ReplayShape:
    """Attention of one rank.

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim_qk, head_dim_v : int
    dtype : torch.dtype
    """

    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of every stage of a rank, shape [num_stages]; 0 where a stage has no work."""

    rank: int
    forward: FloatArray
    backward: FloatArray


class _Done:
    """A round that is through; see :class:`megatron_fcp.runtime.transport.Pending`."""

    def wait_recvs(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Nowhere:
    """A transport that sends nothing and receives random KV and zero gradients at once."""

    in_order = True

    def __init__(self, plan: RankPlan, generator: torch.Generator) -> None:
        self.rank, self.size, self.position = plan.rank, plan.cp_size, Position()
        self._generator = generator

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> _Done:
        for _, tensor in recvs:
            if self.position.round.startswith("push"):
                tensor.zero_()
            else:
                tensor.normal_(generator=self._generator)
        return _Done()


class _Clock:
    """Times spans on the device's own clock, without waiting for it in between."""

    def __init__(self, device: torch.device, num_stages: int) -> None:
        self._cuda = device.type == "cuda"
        self._device, self._num_stages = device, num_stages
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = np.zeros(num_stages)

    @contextmanager
    def span(self, stage: int) -> Iterator[None]:
        """Time what is run inside."""
        if self._cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            stop.record()
            self._events.append((stage, start, stop))
        else:
            before = time.perf_counter()
            yield
            self._seconds[stage] += time.perf_counter() - before

    def read(self) -> FloatArray:
        """Seconds by stage since the last reading."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            for stage, start, stop in self._events:
                self._seconds[stage] += start.elapsed_time(stop) / 1e3
        out, self._seconds, self._events = self._seconds, np.zeros(self._num_stages), []
        return out


class _TimedForward(ForwardPass):
    clock: _Clock

    def _attend(self, stage: int) -> None:
        if any(work.items for work in self.plan.calls[stage]):
            with self.clock.span(stage):
                super()._attend(stage)


class _TimedBackward(BackwardPass):
    clock: _Clock

    def _attend(self, stage: int, part: int) -> None:
        if any(work.items for work in self.plan.parts[stage][part]):
            with self.clock.span(stage):
                super()._attend(stage, part)


def replay_rank(
    rank_plan: RankPlan,
    shape: ReplayShape,
    kernel: Kernel,
    device: torch.device | str = "cpu",
    *,
    backward: bool = True,
    repeats: int = 3,
) -> StageSeconds:
    """Run a rank's stages in the order of its plan and time each one.

    Parameters
    ----------
    rank_plan : RankPlan
    shape : ReplayShape
    kernel : Kernel
        One that serves ``shape`` on ``device``.
    device : torch.device or str
    backward : bool
        Also run the backward pass; else its seconds are 0.
    repeats : int
        Timed runs after one that is not timed; the median counts, stage by stage.
    """
    device = torch.device(device)
    plan = CompiledPlan(rank_plan, device)
    generator = torch.Generator(device).manual_seed(rank_plan.rank)
    tokens = rank_plan.num_tokens
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    sizes = (heads, shape.head_dim_qk), (kv_heads, shape.head_dim_qk), (kv_heads, shape.head_dim_v)
    q, k, v = (torch.empty(tokens, *s, dtype=shape.dtype, device=device).normal_(generator=generator) for s in sizes)
    scale = shape.head_dim_qk**-0.5
    clock, comm = _Clock(device, len(rank_plan.stages)), Nowhere(rank_plan, generator)
    times: tuple[list[FloatArray], list[FloatArray]] = [], []
    with torch.no_grad():
        for _ in range(repeats + 1):
            forward = _TimedForward(q, k, v, plan, comm, kernel, scale)
            forward.clock = clock
            out, lse = forward.run()
            times[0].append(clock.read())
            if backward:
                dout = torch.ones_like(out)
                backward_pass = _TimedBackward(dout, q, k, v, out, lse, plan, comm, kernel, scale)
                backward_pass.clock = clock
                backward_pass.run()
                times[1].append(clock.read())
    none = np.zeros(len(rank_plan.stages))
    medians = [np.median(np.stack(t[1:]), axis=0) if len(t) > 1 else none for t in times]
    return StageSeconds(rank_plan.rank, *medians)

"""The KV and partial-dKV buffers of one pass, and the transfers that fill and drain them.

``LOCAL`` (0) is the rank's own K and V, or their gradient accumulators; buffer ``s`` is what stage ``s`` received, or
the partial gradients for it. A buffer lives from its first use to its Release step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_fcp.plan.program import LOCAL, Exchange, Segment
from megatron_fcp.runtime.transport import Message, Pending, Transport

Pair = tuple[torch.Tensor, torch.Tensor]


def _views(pair: Pair, segments: Iterable[Segment]) -> list[torch.Tensor]:
    """K and V (or their gradients) of each segment: the order in which both sides of a transfer list them."""
    return [tensor[s.start : s.stop] for s in segments for tensor in pair]


class _Awaited:
    """Rounds on the way, by the buffer that must wait for them."""

    def __init__(self) -> None:
        self.arriving: dict[int, list[Pending]] = {}
        self.leaving: dict[int, list[Pending]] = {}

    def add(self, pending: Pending, exchange: Exchange) -> None:
        for table, transfers in ((self.arriving, exchange.recvs), (self.leaving, exchange.sends)):
            for buffer in sorted({s.buffer for t in transfers for s in t.segments}):
                table.setdefault(buffer, []).append(pending)

    def arrived(self, buffer: int) -> None:
        for pending in self.arriving.pop(buffer, ()):
            pending.wait_recvs()

    def left(self, buffer: int) -> None:
        for pending in self.leaving.pop(buffer, ()):
            pending.wait()


class KVBuffers:
    """Keys and values: the local ones, and what arrives from other ranks.

    Parameters
    ----------
    k : Tensor, shape [num_tokens, num_kv_heads, head_dim_qk], contiguous
    v : Tensor, shape [num_tokens, num_kv_heads, head_dim_v], contiguous
    tokens : list of int
        Length of each buffer.
    transport : Transport or None
        None only where the plan moves nothing.

    Attributes
    ----------
    held_tokens, peak_tokens : int
        Tokens of all buffers but the local one: now, and at most so far.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, tokens: list[int], transport: Transport | None) -> None:
        assert k.is_contiguous()
        assert v.is_contiguous()
        self._tokens, self._transport = tokens, transport
        self._buffers: dict[int, Pair] = {LOCAL: (k, v)}
        self._awaited = _Awaited()
        self.held_tokens = self.peak_tokens = 0

    def pull(self, exchange: Exchange) -> None:
        """Start a round of KV transfers."""
        assert self._transport is not None, "a plan that moves KV needs a transport"
        sends: list[Message] = []
        recvs: list[Message] = []
        for transfer in exchange.sends:
            if not self._transport.in_order:
                for buffer in sorted({s.buffer for s in transfer.segments}):
                    self._awaited.arrived(buffer)  # a forwarded block must be here before it goes on
            for segment in transfer.segments:
                sends.extend((transfer.peer, t) for t in _views(self._buffers[segment.buffer], (segment,)))
        for transfer in exchange.recvs:
            for segment in transfer.segments:
                recvs.extend((transfer.peer, t) for t in _views(self._allocated(segment.buffer), (segment,)))
        self._awaited.add(self._transport.post(sends, recvs), exchange)

    def get(self, buffer: int) -> Pair:
        """K and V of a buffer once all that was pulled into it is there."""
        self._awaited.arrived(buffer)
        return self._buffers[buffer]

    def release(self, buffer: int) -> None:
        """Drop a buffer, once the sends from it are through."""
        self._awaited.arrived(buffer)
        self._awaited.left(buffer)
        if self._buffers.pop(buffer, None) is not None:
            self.held_tokens -= self._tokens[buffer]

    def finish(self) -> None:
        """Wait for the last sends from the local buffer."""
        self._awaited.left(LOCAL)
        assert not self._awaited.arriving, "a pull was never waited for"
        assert not self._awaited.leaving, "a buffer was never released"

    def _allocated(self, buffer: int) -> Pair:
        if buffer not in self._buffers:
            k, v = self._buffers[LOCAL]
            tokens = self._tokens[buffer]
            self._buffers[buffer] = k.new_empty(tokens, *k.shape[1:]), v.new_empty(tokens, *v.shape[1:])
            self.held_tokens += tokens
            self.peak_tokens = max(self.peak_tokens, self.held_tokens)
        return self._buffers[buffer]


class DKVBuffers:
    """Partial gradients of keys and values: the local accumulators, and what must travel back to its owner.

    Parameters
    ----------
    dk : Tensor, shape [num_tokens, num_kv_heads, head_dim_qk], contiguous
        The rank's own accumulator, float32 or float64, zero at the start.
    dv : Tensor, shape [num_tokens, num_kv_heads, head_dim_v], contiguous
    tokens, transport
        As for :class:`KVBuffers`.

    Attributes
    ----------
    held_tokens, peak_tokens : int
        Tokens of all buffers and staging areas but the local accumulator: now, and at most so far.
    """

    def __init__(self, dk: torch.Tensor, dv: torch.Tensor, tokens: list[int], transport: Transport | None) -> None:
        self._tokens, self._transport = tokens, transport
        self._buffers: dict[int, Pair] = {LOCAL: (dk, dv)}
        self._staged: dict[int, tuple[Pending, list[tuple[Segment, Pair]]]] = {}
        self._leaving: dict[int, list[Pending]] = {}
        self.held_tokens = self.peak_tokens = 0

    def get(self, buffer: int) -> Pair:
        """Gradient accumulators of a buffer, zero when first asked for."""
        if buffer not in self._buffers:
            dk, dv = self._buffers[LOCAL]
            tokens = self._tokens[buffer]
            self._buffers[buffer] = dk.new_zeros(tokens, *dk.shape[1:]), dv.new_zeros(tokens, *dv.shape[1:])
            self._hold(tokens)
        return self._buffers[buffer]

    def push(self, exchange: Exchange) -> None:
        """Start a round that brings partial gradients a step nearer to their owner."""
        assert self._transport is not None, "a plan that moves KV needs a transport"
        sends: list[Message] = []
        recvs: list[Message] = []
        staged: list[tuple[Segment, Pair]] = []
        for transfer in exchange.sends:
            for segment in transfer.segments:
                sends.extend((transfer.peer, t) for t in _views(self.get(segment.buffer), (segment,)))
        dk, dv = self._buffers[LOCAL]
        for transfer in exchange.recvs:
            pair = dk.new_empty(transfer.tokens, *dk.shape[1:]), dv.new_empty(transfer.tokens, *dv.shape[1:])
            self._hold(transfer.tokens)
            start = 0
            for segment in transfer.segments:
                part = pair[0][start : start + segment.tokens], pair[1][start : start + segment.tokens]
                recvs.extend((transfer.peer, t) for t in part)
                staged.append((segment, part))
                start += segment.tokens
        pending = self._transport.post(sends, recvs)
        if staged:
            self._staged[exchange.round] = pending, staged
        for buffer in sorted({s.buffer for t in exchange.sends for s in t.segments}):
            self._leaving.setdefault(buffer, []).append(pending)

    def reduce(self, round_: int) -> None:
        """Add what a push round brought; the plan fixes the order, so sums have the same bits in every run."""
        pending, staged = self._staged.pop(round_)
        pending.wait_recvs()
        for segment, parts in staged:
            for accumulator, part in zip(_views(self.get(segment.buffer), (segment,)), parts):
                accumulator += part
            self.held_tokens -= segment.tokens

    def release(self, buffer: int) -> None:
        """Drop a buffer, once the sends from it are through."""
        for pending in self._leaving.pop(buffer, ()):
            pending.wait()
        if self._buffers.pop(buffer, None) is not None:
            self.held_tokens -= self._tokens[buffer]

    def finish(self) -> None:
        """Check that nothing was left behind."""
        assert not self._leaving, "a push was never waited for"
        assert not self._staged, "a push was never reduced"
        assert set(self._buffers) == {LOCAL}, "a buffer was never released"

    def _hold(self, tokens: int) -> None:
        self.held_tokens += tokens
        self.peak_tokens = max(self.peak_tokens, self.held_tokens)

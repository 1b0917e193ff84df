"""Work lists as calls of variable-length kernels, which take packed rows and cumulative lengths.

A package's kernel wants the sequences of a call one after the other, so query rows and keys that do not lie so are
gathered (one index_select of a stage's rows; a slice where they do). KV ranges of a work list may overlap, where a
rank holds several pieces of one document: such rows are packed more than once, and their gradients are summed layer by
layer, a layer being items with disjoint ranges, so that no sum depends on a race. A call packs at most ``MAX_REPEATS``
times the stage's KV; what would need more is cut into several calls. So no call reads or writes a row of a tensor that
it does not own, and every row of a gradient buffer is written.

Anticausal items, at the edge of a window, are packed backwards: then they are causal and bottom-right aligned.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_fcp.plan.arrays import offsets, ranges
from megatron_fcp.runtime.kernels.base import Gradients, Kernel, Rows, WorkList

MAX_REPEATS = 2


@dataclass(frozen=True)
class Call:
    """Items of a work list, packed.

    Attributes
    ----------
    rows, keys : Rows
        Query and KV rows, item after item, each item backwards if the work is anticausal; keys may repeat.
    place : Rows
        Where the query rows lie among the rows of the whole work list.
    sums : tuple of (packed, target) : tuple of (Rows, Rows)
        Layer by layer, which packed KV rows add to which KV rows; none occurs twice in a layer.
    cu_seqlens_q, cu_seqlens_kv : Tensor, shape [num_items + 1], int32
    max_seqlen_q, max_seqlen_kv : int
        On the host, so that no kernel has to ask the device for them.
    causal : bool
        Bottom-right aligned mask; no item has more queries than keys then.
    square : bool
        Every item has as many queries as keys, as far as the mask could tell the difference.
    window : int or None
        Keys before its own that a query sees at most; only on causal square calls.
    """

    rows: Rows
    keys: Rows
    place: Rows
    sums: tuple[tuple[Rows, Rows], ...]
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    causal: bool
    square: bool
    window: int | None

    @property
    def window_size(self) -> tuple[int, int]:
        """Keys before and after its own that a query sees at most, -1 for no limit, beside the causal mask."""
        return (-1, -1) if self.window is None else (self.window, 0)

    @property
    def lengths(self) -> dict[str, Any]:
        """Lengths of the items, by the names that the FlashAttention packages have for them."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_kv,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_kv,
        }


def split_calls(work: WorkList) -> tuple[Call, ...]:
    """Calls of a work list: as many of its layers together as ``MAX_REPEATS`` allows."""
    items = np.array(work.items, dtype=np.int64).reshape(-1, 4)
    kv = items[:, 3] - items[:, 2]
    layer = _layers(items)
    room = MAX_REPEATS * int(items[:, 3].max() - items[:, 2].min())
    call = np.zeros(len(items), dtype=np.int64)
    packed = last = 0
    for n in range(int(layer.max()) + 1):
        rows = int(kv[layer == n].sum())
        if packed + rows > room:
            packed, last = 0, last + 1
        packed += rows
        call[layer == n] = last
    place = offsets(items[:, 1] - items[:, 0])[:-1]
    members = [np.flatnonzero(call == n) for n in range(last + 1)]
    return tuple(_call(items[m], place[m], layer[m], work) for m in members)


def _layers(items: np.ndarray) -> np.ndarray:
    """Layer of each item: the first one whose KV ranges end before its own begins."""
    layer = np.zeros(len(items), dtype=np.int64)
    ends: list[int] = []
    for i, (kv_start, kv_stop) in enumerate(items[:, 2:].tolist()):
        chosen = next((n for n, end in enumerate(ends) if end <= kv_start), len(ends))
        if chosen == len(ends):
            ends.append(0)
        ends[chosen] = kv_stop
        layer[i] = chosen
    return layer


def _call(items: np.ndarray, place: np.ndarray, layer: np.ndarray, work: WorkList) -> Call:
    device = work.cu_seqlens_q.device
    q, kv = items[:, 1] - items[:, 0], items[:, 3] - items[:, 2]
    first = offsets(kv)[:-1]
    members = [np.flatnonzero(layer == n) for n in np.unique(layer)]
    once = len(members) == 1

    def rows(start: np.ndarray, count: np.ndarray, ascend: bool = True) -> Rows:
        if work.anticausal:
            return _index(_backwards(start, count), device)
        return Rows.of(ranges(start, count), device) if ascend else _index(ranges(start, count), device)

    return Call(
        rows=rows(items[:, 0], q),
        keys=rows(items[:, 2], kv, ascend=once),
        place=rows(place, q),
        sums=tuple((Rows.of(ranges(first[m], kv[m]), device), rows(items[m, 2], kv[m])) for m in members),
        cu_seqlens_q=torch.from_numpy(offsets(q).astype(np.int32)).to(device),
        cu_seqlens_kv=torch.from_numpy(offsets(kv).astype(np.int32)).to(device),
        max_seqlen_q=int(q.max()),
        max_seqlen_kv=int(kv.max()),
        causal=work.causal or work.anticausal,
        square=not work.anticausal or bool((q == kv).all()),
        window=work.window,
    )


def _backwards(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Concatenation of ``start + count - 1, ..., start`` over the pairs."""
    return np.repeat(start, count) + np.repeat(count, count) - 1 - ranges(np.zeros_like(count), count)


def _index(rows: np.ndarray, device: torch.device) -> Rows:
    """Rows in any order."""
    return Rows(rows.size, None, torch.from_numpy(rows).to(device))


class VarlenKernel(Kernel):
    """A kernel of packed sequences; sub-classes say how one :class:`Call` is made."""

    def padded_dims(self, dim_qk: int, dim_v: int) -> tuple[int, int]:
        """Head dims that the kernel computes with; zeros in the surplus change neither scores nor kept columns."""
        return dim_qk, dim_v

    @abstractmethod
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward of one call on packed rows: (out [rows, heads, dim_v], natural lse [rows, heads])."""

    @abstractmethod
    def differentiate(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: Call,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Backward of one call on packed rows: (dq, dk, dv), every row written; ``lse`` has shape [rows, heads]."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: WorkList, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls = work.prepare("varlen calls", split_calls)
        parts = [self._attend(q, k, v, call, scale) for call in calls]
        if len(parts) == 1 and not work.anticausal:  # packed in the order of the work list
            return parts[0]
        out = parts[0][0].new_empty(work.rows.count, q.shape[1], v.shape[2])
        lse = parts[0][1].new_empty(work.rows.count, q.shape[1])
        for call, (part_out, part_lse) in zip(calls, parts):
            call.place.put(out, part_out)
            call.place.put(lse, part_lse)
        return out, lse

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim_qk, dim_v = self.padded_dims(q.shape[2], v.shape[2])
        q_ = _pad(call.rows.take(q), dim_qk)
        k_, v_ = _pad(call.keys.take(k), dim_qk), _pad(call.keys.take(v), dim_v)
        out, lse = self.attend(q_, k_, v_, call, scale)
        return out[..., : v.shape[2]], lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: WorkList,
        scale: float,
        into: Gradients,
    ) -> None:
        dim_qk, dim_v = self.padded_dims(q.shape[2], v.shape[2])
        for call in work.prepare("varlen calls", split_calls):
            dout_, out_ = _pad(call.rows.take(dout), dim_v), _pad(call.rows.take(out), dim_v)
            q_, k_ = _pad(call.rows.take(q), dim_qk), _pad(call.keys.take(k), dim_qk)
            v_, lse_ = _pad(call.keys.take(v), dim_v), call.rows.take(lse)
            dq, dk, dv = self.differentiate(dout_, q_, k_, v_, out_, lse_, call, scale)
            _add(into.dq, call.rows, dq[..., : q.shape[2]])
            for packed, target in call.sums:
                _add(into.dk, target, packed.take(dk)[..., : q.shape[2]])
                _add(into.dv, target, packed.take(dv)[..., : v.shape[2]])


def heads_first(lse: torch.Tensor) -> torch.Tensor:
    """``[rows, heads]`` as the backward passes of FlashAttention take it: ``[heads, rows]``, contiguous."""
    return lse.transpose(0, 1).contiguous()


def unwritten(*like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous tensors for a kernel to write gradients of ``like`` to, every row of them."""
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like)


def _pad(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Last dimension contiguous, as every package wants it, and zero-padded to ``dim``."""
    if tensor.shape[2] < dim:
        return torch.nn.functional.pad(tensor, (0, dim - tensor.shape[2]))
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _add(total: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
    """``total[rows] += part``; no row occurs twice, so the sum has one order and the same bits in every run."""
    if rows.start is not None:
        total[rows.start : rows.start + rows.count].add_(part)  # `+=` on a slice would copy it onto itself as well
    else:
        assert rows.index is not None
        total.index_add_(0, rows.index, part.to(total.dtype))

"""The one interface of attention kernels, and the work lists they run.

A kernel attends ranges of query rows to ranges of KV rows: what a variable-length kernel takes as ``cu_seqlens``. A
forward call returns packed partial results with their log-sum-exp, which the runtime merges; a backward call gets the
*final* output and log-sum-exp and adds its partial gradients to accumulators of the runtime, so that overlapping KV
ranges need no extra memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_fcp.plan.arrays import offsets, ranges
from megatron_fcp.plan.work import StageWork

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What a kernel is asked to do; compared with what each adapter can.

    Attributes
    ----------
    device : torch.device
    dtype : torch.dtype
    head_dim_qk, head_dim_v, num_heads, num_kv_heads : int
    window : bool
        Whether queries may see only so many keys before them.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim_qk: int
    head_dim_v: int
    num_heads: int
    num_kv_heads: int
    window: bool = False


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor's first dimension: a slice where they are contiguous, else an index."""

    count: int
    start: int | None
    index: torch.Tensor | None

    @staticmethod
    def of(index: np.ndarray, device: torch.device) -> Rows:
        """Rows ``index`` (ascending)."""
        if index.size and index[-1] - index[0] + 1 == index.size:
            return Rows(index.size, int(index[0]), None)
        return Rows(index.size, None, torch.from_numpy(index).to(device))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows, as a view where possible."""
        if self.start is not None:
            return tensor[self.start : self.start + self.count]
        return tensor.index_select(0, self._index)

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the rows."""
        if self.start is not None:
            tensor[self.start : self.start + self.count] = values
        else:
            tensor.index_copy_(0, self._index, values)

    @property
    def _index(self) -> torch.Tensor:
        assert self.index is not None
        return self.index


@dataclass(frozen=True)
class WorkList:
    """Work of one stage, on the host for kernels that loop and on the device for those that take all at once.

    Attributes
    ----------
    items : tuple of (q_start, q_stop, kv_start, kv_stop)
        Query ranges are ascending and disjoint; KV ranges may overlap. None is empty.
    causal : bool
        Bottom-right aligned causal mask on every item; both ranges are equally long then.
    anticausal : bool
        Query ``i`` of an item sees its keys ``i`` and later, of which there is at least one. Taken backwards, that is a
        bottom-right aligned causal mask. Neither causal nor anticausal: every query sees every key.
    window : int or None
        Causal only: a query sees at most this many keys before its own.
    rows : Rows
        Query rows covered, item after item.
    cu_seqlens_q, cu_seqlens_kv : Tensor, shape [num_items + 1], int32
        Packed lengths.
    kv_index : Tensor, shape [sum of kv lengths], int64
        KV rows, item after item; repeats where ranges overlap. Empty unless :attr:`kv_packed` is False.
    kv_packed : bool
        The KV ranges follow each other without gap or overlap from row 0 on.
    max_seqlen_q, max_seqlen_kv : int
    prepared : dict
        What a kernel derives from the list, kept for all layers; see :meth:`prepare`.
    """

    items: tuple[tuple[int, int, int, int], ...]
    causal: bool
    rows: Rows
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    kv_index: torch.Tensor
    kv_packed: bool
    max_seqlen_q: int
    max_seqlen_kv: int
    anticausal: bool = False
    window: int | None = None
    prepared: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_stage(stage: StageWork, device: torch.device) -> WorkList:
        """Put a stage's work list on ``device``."""
        q, kv = stage.q_stop - stage.q_start, stage.kv_stop - stage.kv_start
        assert (q > 0).all(), "empty query range in a work list"
        assert (kv > 0).all(), "empty KV range in a work list"
        assert not stage.causal or (q == kv).all(), "causal items are square"
        assert not stage.anticausal or (q <= kv).all(), "an anticausal item has a query that sees nothing"
        assert stage.window is None or stage.causal, "only causal work has a window"
        packed = bool((stage.kv_start == offsets(kv)[:-1]).all())
        kv_index = ranges(stage.kv_start[:0], kv[:0]) if packed else ranges(stage.kv_start, kv)
        columns = (stage.q_start, stage.q_stop, stage.kv_start, stage.kv_stop)
        return WorkList(
            items=tuple(zip(*(c.tolist() for c in columns))),
            causal=stage.causal,
            rows=Rows.of(ranges(stage.q_start, q), device),
            cu_seqlens_q=torch.from_numpy(offsets(q).astype(np.int32)).to(device),
            cu_seqlens_kv=torch.from_numpy(offsets(kv).astype(np.int32)).to(device),
            kv_index=torch.from_numpy(kv_index).to(device),
            kv_packed=packed,
            max_seqlen_q=int(q.max(initial=0)),
            max_seqlen_kv=int(kv.max(initial=0)),
            anticausal=stage.anticausal,
            window=stage.window,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Its tensors, in the order of :meth:`with_tensors`."""
        rows = [] if self.rows.index is None else [self.rows.index]
        return [self.cu_seqlens_q, self.cu_seqlens_kv, self.kv_index, *rows]

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> WorkList:
        """The same work with the next of ``tensors`` for its own."""
        cu_seqlens_q, cu_seqlens_kv, kv_index = next(tensors), next(tensors), next(tensors)
        rows = self.rows if self.rows.index is None else replace(self.rows, index=next(tensors))
        return replace(
            self, rows=rows, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_index=kv_index, prepared={}
        )

    def prepare(self, key: str, build: Callable[[WorkList], T]) -> T:
        """Value of ``build(self)``, built once per plan."""
        if key not in self.prepared:
            self.prepared[key] = build(self)
        return self.prepared[key]


@dataclass(frozen=True)
class Gradients:
    """Accumulators of a backward call, float32 (float64 for float64 inputs); kernels add to them.

    Attributes
    ----------
    dq : Tensor, shape [num_q_tokens, num_heads, head_dim_qk]
    dk : Tensor, shape [num_kv_tokens, num_kv_heads, head_dim_qk]
    dv : Tensor, shape [num_kv_tokens, num_kv_heads, head_dim_v]
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class Kernel(ABC):
    """An attention kernel. Inputs may have any strides.

    The same inputs always give the same bits, but for kernels that are asked for by name and say so.
    """

    name: str

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Why the kernel cannot serve ``request``; None if it can."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: WorkList, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every item of a work list.

        Parameters
        ----------
        q : Tensor, shape [num_q_tokens, num_heads, head_dim_qk]
        k : Tensor, shape [num_kv_tokens, num_kv_heads, head_dim_qk]
        v : Tensor, shape [num_kv_tokens, num_kv_heads, head_dim_v]
        work : WorkList
            Not empty.
        scale : float
            Factor of the scores.

        Returns
        -------
        out : Tensor, shape [num_rows, num_heads, head_dim_v]
            For the rows ``work.rows``, in that order; may be overwritten by the caller.
        lse : Tensor, shape [num_rows, num_heads], float32 or float64
            Natural log-sum-exp of the scaled scores.
        """

    @abstractmethod
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
        """Add the partial gradients of every item to ``into``.

        ``dout``, ``out`` (shape [num_q_tokens, num_heads, head_dim_v]) and ``lse`` (shape [num_q_tokens, num_heads])
        are those of the whole attention, over all keys of all stages.
        """

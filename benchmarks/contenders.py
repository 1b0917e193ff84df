"""Who runs in real_clocks.py: the same attention, forward and backward, in different hands on two or more ranks.

Every contender holds its rows in its own layout and says which token of the packed stream each row is; rows that are
padding are -1.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from flash_attn_cpu import _flash_attn_varlen_backward as varlen_backward
from flash_attn_cpu import _flash_attn_varlen_forward as varlen_forward
from flash_attn_cpu import backward_op, forward_op, install

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Placement, Plan, build_block_table, make_plan
from megatron_fcp.plan.arrays import frozen, offsets
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.runtime import Communicator, CompiledPlan, fcp_attention, select_kernel
from megatron_fcp.simulate import HardwareModel
from megatron_fcp.simulate.hardware import AttentionShape

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # out, dq, dk, dv


@dataclass(frozen=True)
class Setup:
    """What all contenders are given."""

    lengths: np.ndarray
    rank: int
    size: int
    group: dist.ProcessGroup
    comm: Communicator
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None
    hardware: HardwareModel


class Contender(ABC):
    """One way to run attention."""

    name: str
    rows: np.ndarray  # stream token of each local row, -1 for padding

    @abstractmethod
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Grads:
        """Forward and backward on the local rows."""


class _Planned(Contender):
    def __init__(self, setup: Setup, plan: Plan, tokens: np.ndarray | None = None) -> None:
        rank_plan = plan.rank_plan(setup.rank)
        rows = np.where(rank_plan.document_ids >= 0, rank_plan.local_token_global_indices, -1)
        self.rows = rows if tokens is None else np.where(rows >= 0, tokens[np.maximum(rows, 0)], -1)
        self.plan, self.comm = CompiledPlan(rank_plan), setup.comm
        self.kernel, _ = select_kernel(
            device="cpu", dtype=torch.bfloat16, head_dim_qk=setup.head_dim, head_dim_v=setup.head_dim,
            num_heads=setup.num_heads, num_kv_heads=setup.num_kv_heads,
        )  # fmt: skip

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Grads:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = fcp_attention(q, k, v, plan=self.plan, comm=self.comm, kernel=self.kernel)
        out.backward(dout)
        assert q.grad is not None
        assert k.grad is not None
        assert v.grad is not None
        return out.detach(), q.grad, k.grad, v.grad


class Fcp(_Planned):
    """This project's plan in its runtime."""

    name = "fcp"

    def __init__(self, setup: Setup) -> None:
        tokens = int(setup.lengths.sum()) // setup.size
        shape = AttentionShape(setup.num_heads, setup.num_kv_heads, setup.head_dim)
        super().__init__(
            setup,
            make_plan(
                setup.lengths, cp_size=setup.size, tokens_per_rank=tokens, hardware=setup.hardware.cost(shape),
                config=FcpConfig(block_size=setup.block_size),
            ),
        )  # fmt: skip


class RingPlan(_Planned):
    """A zig-zag ring's sharding as a plan, in the same runtime: the scheduler's part of the difference.

    Every document is padded to whole blocks of 8 tokens per chunk. On two ranks a ring has one step, in which both
    send all that the other needs.
    """

    name = "ring plan, this runtime"
    BLOCK = 8

    def __init__(self, setup: Setup) -> None:
        chunk = -(-setup.lengths // (2 * setup.size * self.BLOCK)) * self.BLOCK
        padded = chunk * 2 * setup.size
        starts = offsets(padded)
        table = build_block_table(setup.lengths, num_tokens=int(starts[-1]), block_size=self.BLOCK, starts=starts[:-1])
        block = np.arange(table.num_blocks) * self.BLOCK
        document = np.searchsorted(starts, block, side="right") - 1
        place = (block - starts[document]) // chunk[document]
        owner = np.minimum(place, 2 * setup.size - 1 - place)
        placement = Placement(setup.size, frozen(owner))
        messages = coalesce(*needed_blocks(table, placement), placement, table.num_blocks)
        plan = Plan(table, placement, schedule_rounds(messages, setup.size, rounds_per_stage=1))
        tokens = np.full(table.num_tokens, -1)
        for source, start, length in zip(offsets(setup.lengths), starts, setup.lengths):
            tokens[start : start + length] = np.arange(source, source + length)
        super().__init__(setup, plan, tokens)


class _Ring(Contender):
    """Zig-zag shards of documents padded to a multiple of ``2 * size`` tokens."""

    def __init__(self, setup: Setup) -> None:
        n = 2 * setup.size
        chunk = -(-setup.lengths // n)
        rows = []
        for source, length, c in zip(offsets(setup.lengths), setup.lengths, chunk):
            token = np.full(c * n, -1)
            token[:length] = np.arange(source, source + length)
            rows += [token[i * c : (i + 1) * c] for i in (setup.rank, n - 1 - setup.rank)]
        self.rows = np.concatenate(rows)
        self.cu_seqlens = torch.from_numpy(offsets(2 * chunk).astype(np.int32))
        self.longest, self.group = int(2 * chunk.max()), setup.group
        self.scale = setup.head_dim**-0.5


class RingFlashAttn(_Ring):
    """``zigzag_ring_flash_attn_varlen_func`` of the package ring-flash-attn, on the stand-in kernel."""

    name = "ring-flash-attn 0.1.8"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        install()
        from ring_flash_attn.zigzag_ring_flash_attn_varlen import zigzag_ring_flash_attn_varlen_func

        self.function = zigzag_ring_flash_attn_varlen_func

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Grads:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = self.function(q, k, v, self.cu_seqlens, self.longest, causal=True, group=self.group)
        out.backward(dout)
        return out.detach(), q.grad, k.grad, v.grad


class TorchRing(_Ring):
    """PyTorch's ring, document by document: it has no variable-length form."""

    name = "PyTorch's ring"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        from torch.distributed.tensor.experimental._context_parallel import _attention

        self.ring = _attention

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Grads:
        edges, parts = self.cu_seqlens.tolist(), []
        for a, b in itertools.pairwise(edges):
            q_, k_, v_, dout_ = (t[a:b].transpose(0, 1).unsqueeze(0) for t in (q, k, v, dout))
            out, lse = self.ring._templated_ring_attention(
                self.group, 2, _forward, q_, k_, v_, is_causal=True, scale=self.scale
            )
            gradients = self.ring._templated_ring_attention_backward(
                self.group, 2, _backward, dout_, "grad_out", q_, k_, v_, out, lse, True, scale=self.scale
            )
            parts.append([t[0].transpose(0, 1) for t in (out, *gradients[:3])])
        out, dq, dk, dv = (torch.cat(t) for t in zip(*parts))
        return out, dq, dk, dv


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward_op(q, k, v, causal=is_causal, scale=scale)


def _backward(
    *, grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, is_causal: bool, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return backward_op(grad_out, query, key, value, out, lse=logsumexp, causal=is_causal, scale=scale)


class Whole(Contender):
    """Every document as one kernel call, all on this rank, nothing to send: ``size`` times the compute bound."""

    name = "compute bound"

    def __init__(self, setup: Setup) -> None:
        self.rows = np.arange(int(setup.lengths.sum()))
        self.cu_seqlens = torch.from_numpy(offsets(setup.lengths).astype(np.int32))
        self.longest, self.scale = int(setup.lengths.max()), setup.head_dim**-0.5

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Grads:
        shape = (self.cu_seqlens, self.cu_seqlens, self.longest, self.longest, 0.0, self.scale, True)
        out, lse, _, _ = varlen_forward(q, k, v, *shape)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, *shape)
        return out, dq, dk, dv


CONTENDERS: tuple[type[Contender], ...] = (Fcp, RingPlan, RingFlashAttn, TorchRing, Whole)

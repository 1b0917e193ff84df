"""Attention of one rank: the steps of its plan, one after the other, with autograd around them.

::

    forward    pull KV ----> attend what is here ----> merge (out, lse) ----> out
    backward   pull KV again -> partial dQ, dK, dV --> push dK, dV to the owner --> sum in the plan's order

Nothing is decided here: a plan's passes are straight lines of steps (:mod:`megatron_fcp.plan.program`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_fcp.plan.program import LOCAL, Compute, Exchange, Reduce, Release, Step
from megatron_fcp.runtime.buffers import DKVBuffers, KVBuffers
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels.base import Gradients, Kernel
from megatron_fcp.runtime.merge import Accumulator, accumulator_dtype, sink_gradient
from megatron_fcp.runtime.spans import span
from megatron_fcp.runtime.transport import Transport


def fcp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: CompiledPlan,
    comm: Transport | None,
    kernel: Kernel,
    softmax_scale: float | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a rank's queries to their documents' keys, wherever those live.

    Every rank of the group calls this the same number of times in the same order, ranks without real tokens included.

    Parameters
    ----------
    q : Tensor, shape [num_tokens, num_heads, head_dim_qk]
        The rank's tokens in the order of ``plan.rank_plan.local_token_global_indices``; any strides.
    k : Tensor, shape [num_tokens, num_kv_heads, head_dim_qk]
    v : Tensor, shape [num_tokens, num_kv_heads, head_dim_v]
    plan : CompiledPlan
    comm : Transport or None
        The context-parallel group; None at context-parallel size 1.
    kernel : Kernel
        From :func:`megatron_fcp.runtime.kernels.select_kernel`.
    softmax_scale : float, optional
        Factor of the scores; default ``head_dim_qk ** -0.5``.
    sink : Tensor, optional, shape [num_heads]
        A logit in the denominator of each head's softmax, unscaled; any floating dtype. Its gradient is that of the
        rank's own tokens.

    Returns
    -------
    Tensor, shape [num_tokens, num_heads, head_dim_v], dtype of ``q``
        Exactly 0 on padding, as are the gradients there, whatever the padding rows hold.

    Raises
    ------
    ValueError
        For shapes that do not fit the plan or each other.
    FcpTimeout, PeerLost
        If another rank stalls or dies.
    """
    check_inputs(q, k, v, plan, comm, sink)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    return _Attention.apply(q, k.to(q.dtype), v.to(q.dtype), sink, plan, comm, kernel, scale)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: CompiledPlan,
    comm: Transport | None,
    sink: torch.Tensor | None = None,
    *,
    num_tokens: int | None = None,
) -> None:
    """Raise ValueError for shapes that do not fit each other or ``num_tokens`` (default: those of the plan)."""
    num_tokens = plan.num_tokens if num_tokens is None else num_tokens
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 3):
        raise ValueError(f"q, k and v must have shape [tokens, heads, head_dim]; got {shapes}")
    if not (q.shape[0] == k.shape[0] == v.shape[0] == num_tokens):
        raise ValueError(f"the plan gives this rank {num_tokens} tokens; got {shapes}")
    if q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % max(k.shape[1], 1):
        raise ValueError(f"head counts or head dims of q, k and v do not fit each other: {shapes}")
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    if (rank, size) != (plan.rank_plan.rank, plan.rank_plan.cp_size):
        raise ValueError(
            f"the plan is that of rank {plan.rank_plan.rank} of {plan.rank_plan.cp_size}, "
            f"but the communicator is rank {rank} of {size}"
        )
    if sink is not None and sink.shape != (q.shape[1],):
        raise ValueError(f"the sink must have one logit for each of {q.shape[1]} heads; got shape {tuple(sink.shape)}")


class ForwardPass:
    """One forward pass of a rank; :meth:`run` it once.

    Parameters
    ----------
    q, k, v : Tensor
        As for :func:`fcp_attention`, k and v contiguous.
    plan, comm, kernel, scale
        As for :func:`fcp_attention`.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: CompiledPlan,
        comm: Transport | None,
        kernel: Kernel,
        scale: float,
    ) -> None:
        self.q, self.plan, self.comm, self.kernel, self.scale = q, plan, comm, kernel, scale
        self.kv = KVBuffers(k, v, [stage.kv_tokens for stage in plan.rank_plan.stages], comm)
        self.sum = Accumulator(q.shape[0], q.shape[1], v.shape[2], like=q)

    def run(
        self, sink: torch.Tensor | None = None, meanwhile: Callable[[], None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in q's dtype and log-sum-exp in the accumulator's, both with ``sink``.

        ``meanwhile`` is called once all pulls are posted, which is the same place in the order of every rank.
        """
        steps = self.plan.rank_plan.forward
        _enter(self.comm, "forward of attention", self.plan, steps)
        for i, step in _with(meanwhile, _last(steps, "pull"), steps):
            _at(self.comm, i, step)
            with span("forward", step):
                self._run(step)
        self.kv.finish()
        out, lse = self.sum.finish(sink)
        return out.to(self.q.dtype), lse

    def _run(self, step: Step) -> None:
        if isinstance(step, Exchange):
            self.kv.pull(step)
        elif isinstance(step, Compute):
            self._attend(step.stage)
        else:
            assert isinstance(step, Release), step
            self.kv.release(step.buffer)

    def _attend(self, stage: int) -> None:
        for i, work in enumerate(self.plan.calls[stage]):
            if work.items:
                k, v = self.kv.get(stage)
                out, lse = self.kernel.forward(self.q, k, v, work, self.scale)
                self.sum.add(work.rows, out, lse, first=stage == LOCAL and i == 0)


class BackwardPass:
    """One backward pass of a rank; :meth:`run` it once.

    Parameters
    ----------
    dout : Tensor, shape [num_tokens, num_heads, head_dim_v]
    q, k, v, out, lse : Tensor
        Inputs and results of the forward pass.
    plan, comm, kernel, scale
        As for :func:`fcp_attention`.
    """

    def __init__(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        plan: CompiledPlan,
        comm: Transport | None,
        kernel: Kernel,
        scale: float,
    ) -> None:
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
        self.plan, self.comm, self.kernel, self.scale = plan, comm, kernel, scale
        tokens = [stage.kv_tokens for stage in plan.rank_plan.stages]
        dtype = accumulator_dtype(q.dtype)
        self.dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.dk = torch.zeros(k.shape, dtype=dtype, device=q.device)
        self.dv = torch.zeros(v.shape, dtype=dtype, device=q.device)
        self.kv = KVBuffers(k, v, tokens, comm)
        self.dkv = DKVBuffers(self.dk, self.dv, tokens, comm)

    def run(self, meanwhile: Callable[[], None] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) in the dtype of the inputs.

        ``meanwhile`` is called at one place in the order of all ranks: between the last pull and the first push of the
        plan, or, where pushes go between pulls, once all are posted.
        """
        steps = self.plan.rank_plan.backward
        place = _last(steps, "pull") if self.plan.rank_plan.pulls_first else _last(steps, "pull", "push")
        _enter(self.comm, "backward of attention", self.plan, steps)
        for i, step in _with(meanwhile, place, steps):
            _at(self.comm, i, step)
            with span("backward", step):
                self._run(step)
        self.kv.finish()
        self.dkv.finish()
        dtype = self.q.dtype
        return self.dq.to(dtype), self.dk.to(dtype), self.dv.to(dtype)

    def _run(self, step: Step) -> None:
        if isinstance(step, Exchange):
            (self.kv.pull if step.kind == "pull" else self.dkv.push)(step)
        elif isinstance(step, Compute):
            self._attend(step.stage, step.part)
        elif isinstance(step, Reduce):
            self.dkv.reduce(step.round)
        else:
            (self.kv if step.kind == "kv" else self.dkv).release(step.buffer)

    def _attend(self, stage: int, part: int) -> None:
        for work in self.plan.parts[stage][part]:
            if work.items:
                k, v = self.kv.get(stage)
                into = Gradients(self.dq, *self.dkv.get(stage))
                self.kernel.backward(self.dout, self.q, k, v, self.out, self.lse, work, self.scale, into)


def _enter(comm: Transport | None, task: str, plan: CompiledPlan, steps: tuple[Step, ...]) -> None:
    if comm is not None:
        comm.position.enter(task, plan.rank_plan.digest, len(steps), steps)


def _last(steps: tuple[Step, ...], *kinds: str) -> int:
    """Place behind the last exchange of some kinds."""
    return max((i + 1 for i, step in enumerate(steps) if isinstance(step, Exchange) and step.kind in kinds), default=0)


def _with(meanwhile: Callable[[], None] | None, place: int, steps: tuple[Step, ...]) -> Iterator[tuple[int, Step]]:
    """Steps with their numbers; ``meanwhile`` is called when those before ``place`` are done."""
    for i, step in enumerate(steps):
        if i == place and meanwhile is not None:
            meanwhile()
        yield i, step
    if place >= len(steps) and meanwhile is not None:
        meanwhile()


def _at(comm: Transport | None, index: int, step: Step) -> None:
    if comm is not None:
        comm.position.step = index
        comm.position.round = f"{step.kind} round {step.round}" if isinstance(step, Exchange) else ""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        plan: CompiledPlan,
        comm: Transport | None,
        kernel: Kernel,
        scale: float,
    ) -> torch.Tensor:
        k, v = k.contiguous(), v.contiguous()
        out, lse = ForwardPass(q, k, v, plan, comm, kernel, scale).run(sink)
        ctx.save_for_backward(sink, q, k, v, out, lse)
        ctx.rest = plan, comm, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        sink, *tensors = ctx.saved_tensors
        gradients = BackwardPass(dout, *tensors, *ctx.rest).run()
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            *_, out, lse = tensors
            dsink = sink_gradient(sink, dout, out, lse).to(sink.dtype)
        return (*gradients, dsink, None, None, None, None)

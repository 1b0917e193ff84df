"""Run a plan's attention on every rank, in either layout, and measure its distance from the right answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from megatron_fcp.config import HEAD_GROUPS
from megatron_fcp.plan import Plan
from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.route import make_route
from megatron_fcp.plan.sharding import contiguous, zigzag
from megatron_fcp.runtime.attention import fcp_attention
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels import Kernel, select_kernel
from megatron_fcp.runtime.reshuffle import CompiledRoute
from megatron_fcp.runtime.reshuffled import reshuffled_attention
from megatron_fcp.runtime.transport import Transport
from megatron_fcp.testing.reference import AttentionResult, dense_attention
from megatron_fcp.testing.threads import Mode, run_ranks

NAMES = ("out", "dq", "dk", "dv")
TOLERANCE = 1e-12  # of fp64 results


@dataclass(frozen=True)
class Model:
    """Heads, dtype, kernel and layout of an attention under test.

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim_qk, head_dim_v : int
    dtype : torch.dtype
    kernel : str
    layout : {"resident", "reshuffle"}
        Reshuffle: zigzag outside where the stream can be cut so, else contiguous pieces.
    spread : float
        Factor on q, so that logits become large.
    scale : float or None
        Softmax scale.
    sink : float or None
        Logit of the first head's sink; every head's is a little more than the one before it.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 8
    head_dim_v: int = 8
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    layout: Literal["resident", "reshuffle"] = "resident"
    spread: float = 1.0
    scale: float | None = None
    sink: float | None = None

    def sinks(self) -> torch.Tensor | None:
        """Logits of the sinks, shape [num_heads]."""
        return None if self.sink is None else self.sink + 0.25 * torch.arange(self.num_heads, dtype=torch.float64)

    def select(self, window: bool = False) -> Kernel:
        """The kernel that serves this model on a CPU."""
        return select_kernel(
            self.kernel,
            device="cpu",
            dtype=self.dtype,
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            window=window,
        )[0]


def random_model(rng: np.random.Generator) -> Model:
    """An fp64 model: MHA, GQA or one KV head, equal or unequal head dims, either layout, either kernel."""
    num_heads, num_kv_heads = ((2, 2), (4, 2), (4, 1), (3, 3))[rng.integers(4)]
    head_dim_qk, head_dim_v = ((8, 8), (4, 4), (12, 8), (5, 5))[rng.integers(4)]
    return Model(
        num_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_v,
        kernel="reference" if rng.random() < 0.25 else "auto",
        layout="reshuffle" if rng.random() < 0.5 else "resident",
    )


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output over the whole stream, NaN on padding."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def random_inputs(plan: Plan, model: Model, seed: int) -> Inputs:
    """Standard normal inputs in the model's dtype."""
    generator = torch.Generator().manual_seed(seed)
    padding = torch.from_numpy(plan.table.token_documents() < 0)

    def draw(heads: int, dim: int, factor: float = 1.0) -> torch.Tensor:
        values = torch.randn(plan.table.num_tokens, heads, dim, generator=generator, dtype=torch.float64) * factor
        values[padding] = torch.nan
        return values.to(model.dtype)

    return Inputs(
        draw(model.num_heads, model.head_dim_qk, model.spread),
        draw(model.num_kv_heads, model.head_dim_qk),
        draw(model.num_kv_heads, model.head_dim_v),
        draw(model.num_heads, model.head_dim_v),
    )


def right_answer(plan: Plan, model: Model, x: Inputs) -> AttentionResult:
    """Dense float64 attention of the same inputs."""
    return dense_attention(
        x.q,
        x.k,
        x.v,
        x.dout,
        starts=plan.table.document_start.tolist(),
        lengths=plan.table.document_length.tolist(),
        mask=plan.table.mask,
        scale=model.scale,
        window=plan.table.window,
        sink=model.sinks(),
    )


def outside_layout(plan: Plan) -> tuple[IntArray, ...]:
    """Tokens per rank outside attention in the reshuffle layout."""
    num_tokens, cp_size = plan.table.num_tokens, plan.cp_size
    return zigzag(num_tokens, cp_size) if num_tokens % (2 * cp_size) == 0 else contiguous(num_tokens, cp_size)


@dataclass(frozen=True)
class RankResult:
    """What one rank computed; ``index`` are its tokens outside attention."""

    index: torch.Tensor
    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None


def run_rank(
    comm: Transport,
    plan: Plan,
    model: Model,
    x: Inputs,
    kernel: Kernel | None = None,
    skip_padding: bool = True,
    max_groups: int = HEAD_GROUPS,
) -> RankResult:
    """Forward and backward of one rank, the reshuffle included where the model asks for it."""
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    inside = compiled.rank_plan.local_token_global_indices
    route = None
    index = inside
    if model.layout == "reshuffle":
        outside = outside_layout(plan)
        padding = np.flatnonzero(plan.table.token_documents() < 0) if skip_padding else None
        everyone = [plan.rank_plan(r).local_token_global_indices for r in range(plan.cp_size)]
        route = CompiledRoute(make_route(outside, everyone, skipped=padding).rank_route(comm.rank))
        index = outside[comm.rank]
    tokens = torch.from_numpy(index.copy())
    leaves = [t[tokens].requires_grad_() for t in (x.q, x.k, x.v)]
    q, k, v = leaves
    sink = model.sinks()
    if sink is not None:
        sink = sink.to(model.dtype).requires_grad_()
    attend: dict[str, Any] = {
        "plan": compiled,
        "comm": comm if plan.cp_size > 1 else None,
        "kernel": kernel or model.select(plan.table.window is not None),
        "softmax_scale": model.scale,
        "sink": sink,
    }
    if route is None:
        out = fcp_attention(q, k, v, **attend)
    else:
        out = reshuffled_attention(q, k, v, route=route, max_groups=max_groups, **attend)
    out.backward(x.dout[tokens])
    grads: list[Any] = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads), "a gradient is None"
    return RankResult(tokens, out.detach(), *grads, dsink=None if sink is None else sink.grad)


def gather(results: Sequence[RankResult], like: AttentionResult) -> AttentionResult:
    """Results of all ranks in stream order, NaN where no rank holds a token."""
    whole = [torch.full_like(t, torch.nan) for t in like.tensors()]
    for result in results:
        for name, tensor in zip(NAMES, whole):
            tensor[result.index] = getattr(result, name).to(tensor.dtype)
    dsinks = [result.dsink.to(torch.float64) for result in results if result.dsink is not None]
    return AttentionResult(*whole, dsink=torch.stack(dsinks).sum(0) if dsinks else None)


def largest_errors(plan: Plan, got: AttentionResult, want: AttentionResult) -> dict[str, float]:
    """Largest absolute error of out, dq, dk and dv; checks that padding is exactly 0.

    Raises
    ------
    AssertionError
        If a padding row is not exactly 0 or a value is NaN.
    """
    padding = torch.from_numpy(plan.table.token_documents() < 0)
    errors: dict[str, float] = {}
    for name, g, w in zip(NAMES, got.tensors(), want.tensors()):
        assert (g[padding] == 0).all(), f"{name} is not 0 on padding"
        assert not g.isnan().any(), f"{name} holds NaN"
        errors[name] = float((g - w).abs().max()) if g.numel() else 0.0
    if want.dsink is not None:
        assert got.dsink is not None, "the sink got no gradient"
        errors["dsink"] = float((got.dsink - want.dsink).abs().max())
    return errors


def check_in_threads(
    plan: Plan,
    model: Model | None = None,
    *,
    x: Inputs | None = None,
    seed: int = 0,
    mode: Mode = "rendezvous",
    kernel: Kernel | None = None,
    skip_padding: bool = True,
) -> AttentionResult:
    """Run every rank as a thread and compare with dense attention; padding is NaN going in and 0 coming out.

    Raises
    ------
    AssertionError
        If an fp64 result is off by more than :data:`TOLERANCE`, or padding is not exactly 0.
    """
    model = model or Model()
    x = x or random_inputs(plan, model, seed)
    want = right_answer(plan, model, x)
    results = run_ranks(
        plan.cp_size, lambda comm: run_rank(comm, plan, model, x, kernel, skip_padding=skip_padding), mode=mode
    )
    got = gather(results, want)
    for name, error in largest_errors(plan, got, want).items():
        assert error < TOLERANCE, f"{name} is off by {error}"
    return got

"""Activation recomputation loses the context of its batch in autograd's thread, or hangs in collectives of its own.

https://github.com/huggingface/trl/issues/4314 (a replay outside the context that sharded the batch). Here the plan is
an argument, and a replay posts exactly the rounds of the forward pass on every rank. In Megatron's own loop:
``tests/integration/test_fcp_bits.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.route import make_route
from megatron_fcp.plan.sharding import zigzag
from megatron_fcp.runtime import CompiledPlan, CompiledRoute, fcp_attention, reshuffle
from megatron_fcp.testing.attention_check import Model
from megatron_fcp.testing.threads import ThreadTransport, run_ranks

pytestmark = pytest.mark.runtime

CP_SIZE, TOKENS, HIDDEN, LAYERS = 3, 16, 12, 2
MODEL = Model(num_heads=2, num_kv_heads=1, head_dim_qk=4, head_dim_v=4)
# Two batches in flight, as in a pipeline: the second rank of the first one has padding only.
BATCHES = ([9, 4], [1, 30, 2, 14])


def plan_of(documents: list[int]) -> Plan:
    config = FcpConfig(block_size=4, rounds_per_stage=1, blocks_per_message=1)
    return make_plan(documents, cp_size=CP_SIZE, tokens_per_rank=TOKENS, config=config)


def route_of(plan: Plan, rank: int) -> CompiledRoute:
    everyone = [plan.rank_plan(r).local_token_global_indices for r in range(CP_SIZE)]
    return CompiledRoute(make_route(zigzag(CP_SIZE * TOKENS, CP_SIZE), everyone).rank_route(rank))


class Layer:
    """Projection, attention, projection, with a residual."""

    def __init__(self, seed: int, comm: ThreadTransport, layout: str, recompute: str) -> None:
        g = torch.Generator().manual_seed(seed)
        self.qkv = (torch.randn(HIDDEN, 16, generator=g, dtype=torch.float64) / 4).requires_grad_()
        self.out = (torch.randn(8, HIDDEN, generator=g, dtype=torch.float64) / 4).requires_grad_()
        self.comm, self.layout, self.recompute = comm, layout, recompute

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: CompiledPlan, route: Any) -> torch.Tensor:
        if self.layout == "reshuffle":
            q, k, v = reshuffle((q, k, v), route, self.comm)
        out = fcp_attention(q, k, v, plan=plan, comm=self.comm, kernel=MODEL.select())
        return reshuffle((out,), route.reverse(), self.comm)[0] if self.layout == "reshuffle" else out

    def forward(self, x: torch.Tensor, plan: CompiledPlan, route: Any) -> torch.Tensor:
        q, k, v = (t.unflatten(1, (-1, 4)) for t in (x @ self.qkv).split((8, 4, 4), 1))
        if self.recompute.startswith("selective"):
            out = replayed(self.recompute, self.attend, q, k, v, plan, route)
        else:
            out = self.attend(q, k, v, plan, route)
        return x + out.flatten(1) @ self.out

    def __call__(self, x: torch.Tensor, plan: CompiledPlan, route: Any) -> torch.Tensor:
        if self.recompute.startswith("full"):
            return replayed(self.recompute, self.forward, x, plan, route)
        return self.forward(x, plan, route)


def replayed(recompute: str, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return checkpoint(function, *args, use_reentrant="reentrant" in recompute, preserve_rng_state=False)


def train(comm: ThreadTransport, layout: str, recompute: str) -> tuple[list[torch.Tensor], list[int]]:
    """Forward of both batches, backward of both in another thread: gradients, and rounds posted after each pass."""
    layers = [Layer(seed, comm, layout, recompute) for seed in range(LAYERS)]
    g = torch.Generator().manual_seed(7 + comm.rank)
    outputs, inputs, posted = [], [], []
    for documents in BATCHES:
        plan = plan_of(documents)
        compiled, route = CompiledPlan(plan.rank_plan(comm.rank)), route_of(plan, comm.rank)
        x = torch.randn(TOKENS, HIDDEN, generator=g, dtype=torch.float64).requires_grad_()
        inputs.append(x)
        for layer in layers:
            x = layer(x, compiled, route)
        outputs.append(x)
        posted.append(comm.rounds)
    failures: list[BaseException] = []

    def backward() -> None:
        try:
            for out in outputs:
                out.square().sum().backward()
                posted.append(comm.rounds)
        except BaseException as error:
            failures.append(error)
            comm.group.fail(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    grads = [t.grad for t in (*inputs, *(w for layer in layers for w in (layer.qkv, layer.out)))]
    return [g for g in grads if g is not None], posted


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
def test_bits_and_rounds(layout: str) -> None:
    """The transport buffers nothing: ranks that replay different rounds wait for each other for ever."""
    plain = run_ranks(CP_SIZE, lambda comm: train(comm, layout, "none"))
    assert all(len(grads) == len(BATCHES) + 2 * LAYERS for grads, _ in plain)
    for recompute in ("selective", "selective, reentrant", "full", "full, reentrant"):
        again = run_ranks(CP_SIZE, lambda comm, r=recompute: train(comm, layout, r))
        for rank, ((grads, posted), (want, rounds)) in enumerate(zip(again, plain)):
            assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True)), (recompute, rank)
            first, second, back, end = rounds
            # Every forward pass is posted once more, in the backward pass of its own batch ...
            expected = [first, second, back + first, end + second]
            if layout == "resident" or recompute != "selective":
                assert posted == expected, (recompute, rank)
            else:  # ... but for an output's way home that nothing behind it needs again: PyTorch stops before it
                assert posted[:2] == expected[:2]
                assert back < posted[2] <= expected[2], (recompute, rank)
                assert end < posted[3] <= expected[3], (recompute, rank)

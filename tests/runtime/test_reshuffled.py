"""Attention while tokens move in and home: right for any number of groups of heads, in one order on all ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.head_groups import head_groups
from megatron_fcp.plan.program import Exchange
from megatron_fcp.plan.route import make_route
from megatron_fcp.runtime import Communicator, CompiledPlan, CompiledRoute, Kernel, reshuffled_attention
from megatron_fcp.runtime.transport import Message, Pending, Transport
from megatron_fcp.simulate.hardware import AttentionShape, load_hardware
from megatron_fcp.testing.attention_check import (
    TOLERANCE,
    Inputs,
    Model,
    RankResult,
    gather,
    largest_errors,
    outside_layout,
    random_inputs,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

HEADS = Model(num_heads=8, num_kv_heads=4, head_dim_qk=6, head_dim_v=4, layout="reshuffle", sink=0.5)
LENGTHS = [70, 3, 41, 16, 1, 90, 20]  # 241 of 256 tokens
OWNERS_SEND = FcpConfig(block_size=8, rounds_per_stage=1)  # many stages: pushes go between pulls


def plans(cp_size: int = 4) -> dict[str, Plan]:
    cost = load_hardware("flat5920").cost(AttentionShape(num_heads=8, num_kv_heads=4, head_dim=8))
    makespan = make_plan(LENGTHS, cp_size=cp_size, tokens_per_rank=256 // cp_size, config=OWNERS_SEND, hardware=cost)
    owners = make_plan(LENGTHS, cp_size=cp_size, tokens_per_rank=256 // cp_size, config=OWNERS_SEND)
    assert makespan.rank_plan(0).pulls_first
    assert not owners.rank_plan(0).pulls_first
    return {"pulls first": makespan, "pushes between pulls": owners}


KINDS = ("pulls first", "pushes between pulls")


def results(plan: Plan, model: Model, max_groups: int) -> list[RankResult]:
    x = random_inputs(plan, model, 5)
    return run_ranks(
        plan.cp_size, lambda comm: run_rank(comm, plan, model, x, max_groups=max_groups), mode="rendezvous"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_groups", [1, 2, 3, 4])
def test_equals_dense_attention(kind: str, max_groups: int) -> None:
    plan = plans()[kind]
    want = right_answer(plan, HEADS, random_inputs(plan, HEADS, 5))
    errors = largest_errors(plan, gather(results(plan, HEADS, max_groups), want), want)
    assert max(errors.values()) < TOLERANCE, errors


def test_groups_of_heads() -> None:
    assert [(g.q, g.kv) for g in head_groups(12, 6, 4)] == [
        (slice(4 * i, 4 * i + 4), slice(2 * i, 2 * i + 2)) for i in range(3)
    ]
    assert len(head_groups(64, 1, 4)) == 1  # one KV head is not cut
    assert len(head_groups(16, 16, 4)) == 4
    assert len(head_groups(10, 5, 4)) == 1


class Noting:
    """A transport and a kernel that note what is posted and attended to, in the order of one rank."""

    def __init__(self, comm: Transport, kernel: Kernel) -> None:
        self.comm, self.kernel = comm, kernel
        self.rank, self.size, self.position, self.in_order = comm.rank, comm.size, comm.position, comm.in_order
        self.name = kernel.name
        self.order = ""

    def note(self, letter: str) -> None:
        if not self.order.endswith(letter):
            self.order += letter

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self.note("M" if self.position.task == "reshuffle" else "p" if "push" in self.position.round else "k")
        return self.comm.post(sends, recvs)

    def forward(self, *args: Any) -> Any:
        self.note("A")
        return self.kernel.forward(*args)

    def backward(self, *args: Any) -> None:
        self.note("A")
        self.kernel.backward(*args)


def orders(comm: Transport, plan: Plan, x: Inputs) -> tuple[str, str]:
    """What one rank does in forward and in backward: M moves, k pulls KV, p pushes dKV, A attends."""
    noting = Noting(comm, HEADS.select())
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    outside = outside_layout(plan)
    inside = [plan.rank_plan(r).local_token_global_indices for r in range(plan.cp_size)]
    route = CompiledRoute(make_route(outside, inside).rank_route(comm.rank))
    tokens = torch.from_numpy(outside[comm.rank].copy())
    q, k, v = (t[tokens].nan_to_num().requires_grad_() for t in (x.q, x.k, x.v))
    out = reshuffled_attention(q, k, v, plan=compiled, route=route, comm=noting, kernel=noting)  # type: ignore[arg-type]
    forward, noting.order = noting.order, ""
    out.backward(x.dout[tokens].nan_to_num())
    return forward, noting.order


def test_what_moves_does_so_while_other_heads_are_attended_to() -> None:
    """The order of a rank that pulls and pushes, and of one that may do neither; in both layouts of backward."""
    for kind, plan in plans().items():
        x = random_inputs(plan, HEADS, 5)
        for rank, (forward, backward) in enumerate(run_ranks(4, lambda comm, p=plan, y=x: orders(comm, p, y))):
            steps = plan.rank_plan(rank)
            if kind == "pulls first":
                assert any(isinstance(s, Exchange) for s in steps.forward)
                # In with two groups; behind the last KV of each group the one before goes home; then the last one.
                assert re.fullmatch("M(kA)+M(kA)*kMAM(kA)*kMA(kA)*kMAM", forward), forward
                assert re.fullmatch("M(kA)*k[pA]+M(kA)*kM[pA]+M(kA)*kM[pA]+(kA)*kM[pA]+M", backward), backward
            else:
                assert re.fullmatch("M(kA)+M(kA)*kMAM(kA)*kMA(kA)*kMAM", forward), forward
                assert re.fullmatch("M[kpA]+M[kpA]+pMAM[kpA]+pMA[kpA]+pMAM", backward), backward  # behind all pushes


def layers(comm: Transport, plan: Plan, recompute: str) -> list[bytes]:
    """Bits of output and gradients of two attentions in the reshuffle layout on top of each other."""
    model = replace(HEADS, dtype=torch.float32)
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    outside = outside_layout(plan)
    inside = [plan.rank_plan(r).local_token_global_indices for r in range(plan.cp_size)]
    route = CompiledRoute(make_route(outside, inside).rank_route(comm.rank))
    x, kernel = random_inputs(plan, model, 3), model.select()
    tokens = torch.from_numpy(outside[comm.rank].copy())
    leaves = [t[tokens].nan_to_num().requires_grad_() for t in (x.q, x.k, x.v)]
    mix = torch.ones(model.head_dim_v, model.head_dim_qk)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = reshuffled_attention(q * 1.1, k.sin(), v, plan=compiled, route=route, comm=comm, kernel=kernel)
        return out @ mix + q

    q = leaves[0]
    for _ in range(2):
        if recompute == "none":
            q = layer(q, *leaves[1:])
        else:
            again = checkpoint(layer, q, *leaves[1:], use_reentrant=recompute == "reentrant")
            assert isinstance(again, torch.Tensor)
            q = again
    q.sum().backward()
    grads = [leaf.grad for leaf in leaves]
    return [t.detach().numpy().tobytes() for t in (q, *grads) if t is not None]


def over_gloo(comm: Communicator) -> list[list[bytes]]:
    return [layers(comm, plan, how) for plan in plans().values() for how in ("none", "reentrant", "non-reentrant")]


def test_same_bits_over_gloo_with_and_without_recomputation(gloo: GlooPool) -> None:
    everywhere = gloo.run(4, over_gloo)
    for plan, at in zip(plans().values(), (0, 3), strict=True):
        threads = run_ranks(4, lambda comm, p=plan: layers(comm, p, "none"))
        for bits, expected in zip(everywhere, threads, strict=True):
            assert len(expected) == 4
            assert bits[at : at + 3] == [expected] * 3

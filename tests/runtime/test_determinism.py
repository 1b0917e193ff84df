"""The same bits in every run, with recomputation and without; evaluation without gradients."""

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fcp.plan import Plan
from megatron_fcp.runtime import Communicator, CompiledPlan, fcp_attention
from megatron_fcp.runtime.transport import Message, Pending, Transport
from megatron_fcp.testing.attention_check import Model, random_inputs
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.streams import random_case
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

MODEL = Model(dtype=torch.float32)
Bits = list[bytes]


def a_plan(seed: int, cp_size: int) -> Plan:
    rng = np.random.default_rng([41, seed])
    case = random_case(rng)
    while case.cp_size != cp_size or case.plan().schedule.num_rounds < 2:
        case = random_case(rng)
    return reroute(case.plan(), rng) if seed % 2 else case.plan()


def two_layers(comm: Transport, plan: Plan, recompute: str) -> Bits:
    """Bits of output and gradients of two attentions on top of each other, each with a weight."""
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    x = random_inputs(plan, MODEL, 3)
    tokens = torch.from_numpy(compiled.rank_plan.local_token_global_indices.copy())
    real = torch.from_numpy(compiled.rank_plan.document_ids >= 0)
    leaves = [t[tokens].nan_to_num().requires_grad_() for t in (x.q, x.k, x.v)]
    kernel = MODEL.select()

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fcp_attention(q * 1.1, k.sin(), v, plan=compiled, comm=comm, kernel=kernel) + q

    def run(q: torch.Tensor) -> torch.Tensor:
        if recompute == "none":
            return layer(q, *leaves[1:])
        return checkpoint(layer, q, *leaves[1:], use_reentrant=recompute == "reentrant")

    out = run(run(leaves[0]))
    out.backward(x.dout[tokens].nan_to_num() * real[:, None, None])
    return [t.detach().numpy().tobytes() for t in (out, *(leaf.grad for leaf in leaves))]


class Dawdling:
    """Sleeps at random, differently in every run."""

    def __init__(self, comm: Transport) -> None:
        self._comm, self._random = comm, random.SystemRandom()
        self.rank, self.size, self.position, self.in_order = comm.rank, comm.size, comm.position, comm.in_order

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        time.sleep(self._random.uniform(0, 0.002))
        return self._comm.post(sends, recvs)


@pytest.mark.parametrize("seed", range(4))
def test_same_bits_whatever_arrives_first(seed: int) -> None:
    plan = a_plan(seed, 4)
    first = run_ranks(4, lambda comm: two_layers(comm, plan, "none"), mode="eager")
    for mode in ("rendezvous", "eager"):
        again = run_ranks(4, lambda comm: two_layers(Dawdling(comm), plan, "none"), mode=mode)
        assert again == first


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputation_changes_no_bit(recompute: str) -> None:
    """https://github.com/pytorch/pytorch checkpoints replay the forward pass inside backward, on every rank alike."""
    for seed in range(3):
        plan = a_plan(seed, 3)
        kept = run_ranks(3, lambda comm, p=plan: two_layers(comm, p, "none"))
        assert run_ranks(3, lambda comm, p=plan: two_layers(comm, p, recompute)) == kept


def over_gloo(comm: Communicator) -> list[Bits]:
    plan = a_plan(1, comm.size)
    return [two_layers(comm, plan, how) for how in ("none", "reentrant", "non-reentrant", "none")]


def test_same_bits_over_gloo_with_and_without_recomputation(gloo: GlooPool) -> None:
    for rank, (first, *others) in enumerate(gloo.run(4, over_gloo)):
        for bits in others:
            assert bits == first
        assert first == run_ranks(4, lambda comm: two_layers(comm, a_plan(1, 4), "none"))[rank]


def test_evaluation_needs_no_gradients() -> None:
    plan = a_plan(0, 4)
    x = random_inputs(plan, MODEL, 3)

    def evaluate(comm: Transport, grad: bool) -> torch.Tensor:
        compiled = CompiledPlan(plan.rank_plan(comm.rank))
        tokens = torch.from_numpy(compiled.rank_plan.local_token_global_indices.copy())
        q, k, v = (t[tokens].requires_grad_(grad) for t in (x.q, x.k, x.v))
        with torch.set_grad_enabled(grad):
            out = fcp_attention(q, k, v, plan=compiled, comm=comm, kernel=MODEL.select())
        assert out.requires_grad == grad
        return out.detach()

    for with_grad, without in zip(*(run_ranks(4, lambda comm, g=g: evaluate(comm, g)) for g in (True, False))):
        assert torch.equal(with_grad, without)

"""What a pass holds beside the rank's own tensors never exceeds what the plan promises."""

import threading

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, RankPlan, make_plan
from megatron_fcp.plan.program import Peak
from megatron_fcp.runtime import Communicator
from megatron_fcp.runtime.attention import BackwardPass, ForwardPass
from megatron_fcp.runtime.compiled import CompiledPlan
from megatron_fcp.runtime.kernels import Kernel
from megatron_fcp.runtime.transport import Transport
from megatron_fcp.testing.attention_check import Inputs, Model, random_inputs
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.streams import random_case
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

MODEL = Model(num_heads=2, num_kv_heads=1, head_dim_qk=4, head_dim_v=4, dtype=torch.float32)
BYTES_PER_TOKEN = (MODEL.head_dim_qk + MODEL.head_dim_v) * MODEL.num_kv_heads * 4  # KV and its gradient are float32


class Meter(threading.local):
    """Storages that this thread's passes allocated, and the most bytes of them alive at once."""

    def __init__(self) -> None:
        self.refs: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.refs.append((StorageWeakRef(storage), storage.nbytes()))
        self.refs = [(ref, size) for ref, size in self.refs if not ref.expired()]
        self.most = max(self.most, sum(size for _, size in self.refs))
        return tensor

    def alive(self) -> int:
        return sum(size for ref, size in self.refs if not ref.expired())


meter = Meter()


def count_allocations(patch: pytest.MonkeyPatch) -> None:
    """Count every tensor that the buffers of a pass allocate (they do so with new_empty and new_zeros only)."""
    for name in ("new_empty", "new_zeros"):
        original = getattr(torch.Tensor, name)
        patch.setattr(torch.Tensor, name, lambda self, *a, o=original, **kw: meter.add(o(self, *a, **kw)))


@pytest.fixture(autouse=True)
def metered(monkeypatch: pytest.MonkeyPatch) -> None:
    count_allocations(monkeypatch)


def used(comm: Transport, plan: Plan, x: Inputs, kernel: Kernel) -> tuple[RankPlan, list[tuple[int, int, int]]]:
    """(KV tokens, dKV tokens, bytes alive at once) at most, of the forward and of the backward pass."""
    compiled = CompiledPlan(plan.rank_plan(comm.rank))
    tokens = torch.from_numpy(compiled.rank_plan.local_token_global_indices.copy())
    q, k, v, dout = (t[tokens] for t in (x.q, x.k, x.v, x.dout))
    meter.refs, meter.most = [], 0
    forward = ForwardPass(q, k, v, compiled, comm, kernel, 1.0)
    out, lse = forward.run()
    peaks = [(forward.kv.peak_tokens, 0, meter.most)]
    assert forward.kv.held_tokens == meter.alive() == 0
    meter.most = 0
    backward = BackwardPass(dout, q, k, v, out, lse, compiled, comm, kernel, 1.0)
    backward.run()
    peaks.append((backward.kv.peak_tokens, backward.dkv.peak_tokens, meter.most))
    assert backward.kv.held_tokens == backward.dkv.held_tokens == meter.alive() == 0
    return compiled.rank_plan, peaks


def check(plan: Plan) -> list[float]:
    """Share of the promised tokens that was used, per rank and pass that may use any."""
    x = random_inputs(plan, MODEL, 0)
    return shares_of(run_ranks(plan.cp_size, lambda comm: used(comm, plan, x, MODEL.select())))


def shares_of(ranks: list[tuple[RankPlan, list[tuple[int, int, int]]]]) -> list[float]:
    shares: list[float] = []
    for rank_plan, peaks in ranks:
        promised: tuple[Peak, Peak] = (rank_plan.peak_forward, rank_plan.peak_backward)
        for promise, (kv, dkv, most) in zip(promised, peaks):
            assert kv <= promise.kv_tokens
            assert dkv <= promise.dkv_tokens
            assert most <= (promise.kv_tokens + promise.dkv_tokens) * BYTES_PER_TOKEN
            if promise.kv_tokens + promise.dkv_tokens:
                shares.append((kv + dkv) / (promise.kv_tokens + promise.dkv_tokens))
    return shares


def test_no_plan_exceeds_its_promise() -> None:
    shares: list[float] = []
    for seed in range(60):
        rng = np.random.default_rng([51, seed])
        case = random_case(rng)
        shares += check(reroute(case.plan(), rng) if seed % 3 == 0 else case.plan())
    assert np.mean(np.array(shares) == 1.0) > 0.7, "the promise is what is used, not a loose bound"


def test_a_long_document_needs_two_stages_of_memory_however_many_there_are() -> None:
    for blocks in (8, 32, 64):
        config = FcpConfig(block_size=1, rounds_per_stage=1, blocks_per_message=1)
        plan = make_plan([4 * blocks], cp_size=4, tokens_per_rank=blocks, config=config)
        check(plan)
        for rank in range(4):
            rank_plan = plan.rank_plan(rank)
            largest = max(stage.kv_tokens for stage in rank_plan.stages[1:])
            assert len(rank_plan.stages) > blocks // 2
            assert rank_plan.peak_forward.kv_tokens <= 2 * largest


def long_document() -> Plan:
    config = FcpConfig(block_size=2, rounds_per_stage=1, blocks_per_message=1)
    return make_plan([60, 4], cp_size=4, tokens_per_rank=16, config=config)


def over_gloo(comm: Communicator) -> tuple[RankPlan, list[tuple[int, int, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        count_allocations(patch)
        return used(comm, long_document(), random_inputs(long_document(), MODEL, 0), MODEL.select())


def test_posted_rounds_keep_no_buffer_alive_over_gloo(gloo: GlooPool) -> None:
    assert shares_of(gloo.run(4, over_gloo)) == [1.0] * 8

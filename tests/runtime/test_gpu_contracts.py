"""GPU kernel adapters against stand-ins with the packages' signatures and conventions; nothing here ran on a GPU."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Placement, Plan, build_block_table, make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.plan.work import StageWork
from megatron_fcp.runtime.kernels import Gradients, Kernel, WorkList
from megatron_fcp.runtime.kernels.flash_attn_2 import FlashAttention2
from megatron_fcp.runtime.kernels.flash_attn_3 import FlashAttention3
from megatron_fcp.runtime.kernels.flash_attn_4 import FlashAttention4
from megatron_fcp.runtime.kernels.packages import PackagedKernel, parameters
from megatron_fcp.runtime.kernels.reference import Reference
from megatron_fcp.runtime.kernels.torch_cuda_flash import TorchCudaFlash
from megatron_fcp.runtime.kernels.transformer_engine import TransformerEngine
from megatron_fcp.runtime.kernels.varlen import MAX_REPEATS, split_calls
from megatron_fcp.testing.attention_check import (
    Model,
    gather,
    largest_errors,
    random_inputs,
    random_model,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.kernel_signatures import SIGNATURES
from megatron_fcp.testing.kernel_standins import ATEN_BACKWARD, ATEN_FORWARD, aten_stand_in, parse_signature, stand_in
from megatron_fcp.testing.streams import random_case
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime

TOLERANCE = 1e-12
ADAPTER_OF: dict[str, Callable[..., PackagedKernel]] = {
    "flash-attn": FlashAttention2,
    "flash_attn_3": FlashAttention3,
    "flash-attn-4": FlashAttention4,
    "transformer-engine": TransformerEngine,
}
ADAPTERS: dict[str, Callable[[], Kernel]] = {
    f"{distribution} {version}": lambda d=distribution, v=version: ADAPTER_OF[d](stand_in(d, v))
    for distribution, version in SIGNATURES
}
ADAPTERS["torch-cuda"] = lambda: TorchCudaFlash(*aten_stand_in())


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Kernel:
    return ADAPTERS[request.param]()


def work_list(items: list[tuple[int, int, int, int]], mask: bool | int | None, kv_tokens: int) -> WorkList:
    """``mask``: causal (True) or not (False), causal with a window (a number), anticausal (None)."""
    columns = [frozen(column) for column in zip(*items)]
    none = frozen(np.zeros(0, dtype=np.int64))
    windowed = mask is not None and not isinstance(mask, bool)
    stage = StageWork(*columns, mask is True or windowed, kv_tokens, none, none)
    stage = dataclasses.replace(stage, anticausal=mask is None, window=mask if windowed else None)
    return WorkList.from_stage(stage, torch.device("cpu"))


# (query rows, KV rows, mask, items). Query ranges are ascending and disjoint, KV ranges as they come.
CASES: dict[str, tuple[int, int, bool | int | None, list[tuple[int, int, int, int]]]] = {
    "one token": (1, 1, True, [(0, 1, 0, 1)]),
    "one document": (9, 9, True, [(0, 9, 0, 9)]),
    "documents of 1, 2, 3 and 7 tokens": (13, 13, True, [(0, 1, 0, 1), (1, 3, 1, 3), (3, 6, 3, 6), (6, 13, 6, 13)]),
    "padding between documents": (20, 20, True, [(2, 5, 2, 5), (9, 10, 9, 10), (12, 19, 12, 19)]),
    "one query, many keys": (4, 11, False, [(3, 4, 0, 11)]),
    "many queries, one key": (8, 3, False, [(1, 8, 2, 3)]),
    "packed": (12, 9, False, [(0, 4, 0, 3), (4, 5, 3, 8), (5, 12, 8, 9)]),
    "gaps on both sides": (12, 12, False, [(1, 4, 2, 3), (6, 7, 5, 8), (8, 12, 10, 12)]),
    "pieces of one document share keys": (14, 10, False, [(0, 3, 0, 4), (4, 6, 0, 8), (6, 9, 0, 8), (9, 14, 8, 10)]),
    "same keys for all": (9, 5, False, [(0, 2, 0, 5), (2, 5, 0, 5), (5, 9, 0, 5)]),
    "repeats that a gap makes up for": (5, 6, False, [(0, 1, 0, 2), (1, 2, 0, 2), (2, 5, 4, 6)]),
    "keys in falling order": (9, 9, False, [(0, 3, 6, 9), (3, 6, 3, 6), (6, 9, 0, 3)]),
    "window 0": (9, 9, 0, [(0, 1, 0, 1), (1, 7, 1, 7)]),
    "window 1": (12, 12, 1, [(0, 1, 0, 1), (1, 7, 1, 7), (9, 12, 9, 12)]),
    "window 5": (20, 20, 5, [(0, 2, 0, 2), (2, 14, 2, 14), (14, 20, 14, 20)]),
    "anticausal square": (9, 9, None, [(1, 5, 2, 6)]),
    "anticausal of one query": (4, 7, None, [(2, 3, 1, 6)]),
    "anticausal": (14, 20, None, [(0, 4, 0, 4), (4, 6, 6, 11), (7, 14, 13, 20)]),
    "anticausal, of one row each": (7, 9, None, [(1, 2, 0, 1), (2, 3, 1, 2), (3, 5, 3, 9)]),
    "anticausal pieces share keys": (14, 12, None, [(0, 3, 0, 5), (3, 6, 2, 8), (7, 8, 2, 8), (9, 14, 4, 12)]),
}
SHAPES = [(2, 2, 8, 8), (4, 2, 16, 16), (4, 1, 24, 16), (6, 2, 8, 24)]  # heads, KV heads, head dims


def tensors(case: str, shape: tuple[int, int, int, int], seed: int = 0) -> tuple[list[torch.Tensor], WorkList]:
    """q, k, v, dout in float64, NaN on rows that no item owns, and the work list."""
    num_q, num_kv, mask, items = CASES[case]
    heads, kv_heads, dim_qk, dim_v = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((num_q, heads, dim_qk), (num_kv, kv_heads, dim_qk), (num_kv, kv_heads, dim_v), (num_q, heads, dim_v))
    values = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    for is_query, tensor in zip((True, False, False, True), values):
        owned = torch.zeros(tensor.shape[0], dtype=torch.bool)
        for q_start, q_stop, kv_start, kv_stop in items:
            owned[slice(q_start, q_stop) if is_query else slice(kv_start, kv_stop)] = True
        tensor[~owned] = torch.nan
    return values, work_list(items, mask, num_kv)


def run(kernel: Kernel, values: list[torch.Tensor], work: WorkList, whole: Any = None) -> list[torch.Tensor]:
    """out, lse of the work list, and dq, dk, dv added to accumulators of ones; ``whole``: the final out and lse."""
    q, k, v, dout = values
    out, lse = kernel.forward(q, k, v, work, 0.3)
    if whole is None:
        whole = q.new_full((len(q), q.shape[1], v.shape[2]), torch.nan), q.new_full(q.shape[:2], torch.nan)
        for total, part in zip(whole, (out, lse)):
            work.rows.put(total, part)
        whole[1].add_(0.25)  # as if other stages had seen more keys
    into = Gradients(*(torch.ones(t.shape, dtype=torch.float64) for t in (q, k, v)))
    kernel.backward(dout, q, k, v, whole[0], whole[1], work, 0.3, into)
    return [out, lse, into.dq, into.dk, into.dv]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula_on_every_work_list(adapter: Kernel, case: str) -> None:
    for shape in SHAPES:
        values, work = tensors(case, shape)
        got, want = (run(kernel, values, work) for kernel in (adapter, Reference()))
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want):
            assert a.shape == b.shape, (shape, name)
            assert not b.isnan().any(), (shape, name)
            assert (a - b).abs().max() < TOLERANCE, (shape, name)


@pytest.mark.parametrize("case", CASES)
def test_any_strides(adapter: Kernel, case: str) -> None:
    values, work = tensors(case, SHAPES[1])
    want = run(adapter, values, work)
    fused = torch.cat([values[0], values[0]], dim=2)[..., ::2]  # a last dimension that is not contiguous
    fused.copy_(values[0])
    strided = [fused, *(t.transpose(0, 1).contiguous().transpose(0, 1) for t in values[1:])]
    assert not any(t.is_contiguous() for t in strided if t.shape[0] > 1 and t.shape[1] > 1)
    for got, expected in zip(run(adapter, strided, work), want):
        assert torch.equal(got, expected)


def test_sixteen_bits(adapter: Kernel) -> None:
    values, work = tensors("pieces of one document share keys", SHAPES[1])
    want = run(Reference(precise=True), values, work)
    rounded = [t.to(torch.bfloat16) for t in values]
    q, k, v, dout = rounded
    out, lse = adapter.forward(q, k, v, work, 0.3)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    whole = torch.full(dout.shape, torch.nan, dtype=torch.bfloat16), torch.full(q.shape[:2], torch.nan)
    for total, part in zip(whole, (out, lse)):
        work.rows.put(total, part)
    whole[1].add_(0.25)
    into = Gradients(*(torch.ones(t.shape) for t in (q, k, v)))
    adapter.backward(dout, q, k, v, *whole, work, 0.3, into)
    for got, expected in zip((out, lse, into.dq, into.dk, into.dv), want):
        assert (got.double() - expected).abs().max() < 0.05


def test_calls_never_add_to_a_row_twice_at_once() -> None:
    """Every packed KV row is added once, to its own row; rows of one sum are distinct; no call packs too much."""
    for case in CASES:
        _, work = tensors(case, SHAPES[0])
        calls = split_calls(work)
        assert sum(call.cu_seqlens_q.numel() - 1 for call in calls) == len(work.items)
        placed = torch.cat([call.place.take(torch.arange(40)) for call in calls]).tolist()
        assert sorted(placed) == list(range(work.rows.count))
        reach = max(i[3] for i in work.items) - min(i[2] for i in work.items)
        for call in calls:
            keys = call.keys.take(torch.arange(40))
            assert keys.numel() <= MAX_REPEATS * reach
            added = []
            for packed, target in call.sums:
                rows, into = packed.take(torch.arange(40)), target.take(torch.arange(40))
                assert torch.equal(keys[rows], into)
                assert len(set(into.tolist())) == into.numel()
                added += rows.tolist()
            assert sorted(added) == list(range(keys.numel()))
    calls = split_calls(tensors("same keys for all", SHAPES[0])[1])
    assert [len(call.sums) for call in calls] == [2, 1]  # three times the keys, of which a call may hold two
    calls = split_calls(tensors("pieces of one document share keys", SHAPES[0])[1])
    assert [len(call.sums) for call in calls] == [2, 1]
    assert [len(call.sums) for call in split_calls(tensors("packed", SHAPES[0])[1])] == [1]


# Lengths of public bug reports: documents that nothing divides, shorter than the number of ranks, of one token, with
# block edges on and beside document edges. (cp_size, tokens per rank, block size, lengths)
STREAMS: dict[str, tuple[int, int, int, list[int]]] = {
    "7 tokens on 2 ranks (TransformerEngine 1930)": (2, 4, 2, [7]),
    "698 tokens on 4 ranks (TransformerEngine 3331)": (4, 176, 16, [698]),
    "one and two tokens (verl 5981)": (2, 4, 1, [1, 2, 1]),
    "shorter than the ranks": (4, 4, 2, [1, 2, 3, 1, 2, 5]),
    "zero lengths (Megatron-Bridge 4489)": (3, 6, 3, [5, 0, 4, 0, 0, 6]),
    "around a block": (4, 16, 4, [3, 4, 5, 1, 13, 12, 11, 9]),
    "giant and many": (8, 16, 4, [90] + [1] * 20 + [3, 5]),
    "block 4, document of 10 (flash-attention 1778)": (3, 4, 4, [10]),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_whole_attention_equals_dense_attention(adapter: Kernel, stream: str) -> None:
    cp_size, tokens_per_rank, block_size, lengths = STREAMS[stream]
    plan = make_plan(lengths, cp_size=cp_size, tokens_per_rank=tokens_per_rank, config=FcpConfig(block_size=block_size))
    model = Model(4, 2, 16, 8)
    x = random_inputs(plan, model, 3)
    want = right_answer(plan, model, x)
    results = run_ranks(cp_size, lambda comm: run_rank(comm, plan, model, x, kernel=adapter))
    for name, error in largest_errors(plan, gather(results, want), want).items():
        assert error < TOLERANCE, (name, error)


def test_large_logits(adapter: Kernel) -> None:
    """Logits of +-80, where an exp of the log-sum-exp itself would overflow (flash-attention 1088)."""
    plan = make_plan([50, 14], cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=4))
    model = Model(2, 1, 8, 8, spread=60.0)
    x = random_inputs(plan, model, 5)
    want = right_answer(plan, model, x)
    results = run_ranks(4, lambda comm: run_rank(comm, plan, model, x, kernel=adapter))
    for name, error in largest_errors(plan, gather(results, want), want).items():
        assert error < 1e-9, (name, error)


def scattered(rng: np.random.Generator) -> Plan:
    """One or two documents whose blocks lie anywhere, so that a rank holds several pieces of a document."""
    cp_size, blocks, block_size = int(rng.integers(2, 6)), int(rng.integers(2, 6)), 4
    num_tokens = cp_size * blocks * block_size
    cut = int(rng.integers(0, num_tokens // 2))
    table = build_block_table([cut, num_tokens - cut - 1], num_tokens=num_tokens, block_size=block_size, mask="causal")
    placement = Placement(cp_size, frozen(rng.permutation(np.repeat(np.arange(cp_size), blocks))))
    messages = coalesce(*needed_blocks(table, placement), placement, 2)
    schedule = schedule_rounds(messages, cp_size, ranks_per_node=1, rounds_per_stage=int(rng.integers(1, 9)))
    return Plan(table, placement, schedule, 1)


def test_random_streams(adapter: Kernel) -> None:
    """Random lengths and layouts, also with forwarded blocks and with keys that several work items share."""
    shared_keys = 0
    for seed in range(18):
        rng = np.random.default_rng([21, seed])
        plan = scattered(rng) if seed % 3 == 0 else random_case(rng, max_cp_size=6).plan()
        if seed % 3 == 1:
            plan = reroute(plan, rng)
        model = dataclasses.replace(random_model(rng), head_dim_qk=16, head_dim_v=8)
        x = random_inputs(plan, model, seed)
        want = right_answer(plan, model, x)
        results = run_ranks(plan.cp_size, lambda comm, p=plan, m=model, x=x: run_rank(comm, p, m, x, kernel=adapter))
        for name, error in largest_errors(plan, gather(results, want), want).items():
            assert error < TOLERANCE, (seed, name, error)
        for rank in range(plan.cp_size):
            works = [WorkList.from_stage(s, torch.device("cpu")) for s in plan.rank_plan(rank).stages if s.num_items]
            shared_keys += sum(len(split_calls(work)[0].sums) > 1 for work in works)
    assert shared_keys > 5, "too few work lists with shared keys to mean anything"


def test_signatures_behind_custom_operators() -> None:
    @torch.library.custom_op("fcp_test::attend", mutates_args=("dq",))
    def attend(q: torch.Tensor, dq: torch.Tensor, causal: bool = False) -> torch.Tensor:
        return q.clone()

    assert list(parameters(attend).parameters) == ["q", "dq", "causal"]


def test_stand_ins_refuse_what_the_package_does() -> None:
    """The stand-ins themselves: an unknown argument, an empty sequence, a ragged row, a causal mask on a rectangle."""
    package = stand_in("flash-attn", "2.7.0.post2")
    q = torch.randn(6, 2, 8, dtype=torch.float64)
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    good = {"q": q, "k": q, "v": q, "cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 4}
    good |= {"max_seqlen_k": 4, "dropout_p": 0.0, "softmax_scale": 1.0, "causal": True}
    out, lse, *_ = package.forward(**good)
    assert lse.shape == (2, 6)
    with pytest.raises(TypeError, match="zero_tensors"):
        package.forward(**good, zero_tensors=False)
    with pytest.raises(AssertionError, match="empty sequence"):
        package.forward(**good | {"cu_seqlens_q": torch.tensor([0, 0, 6], dtype=torch.int32), "max_seqlen_q": 6})
    short = good | {"cu_seqlens_q": torch.tensor([0, 2, 4], dtype=torch.int32), "max_seqlen_q": 2}
    out, _, *_ = package.forward(**short)
    assert out[4:].isnan().all()
    whole, _, *_ = package.forward(**good)
    assert torch.allclose(out[2], package.forward(**good | {"q": q[[0, 1, 0, 0, 2, 3]]})[0][4])  # bottom-right aligned
    assert not torch.allclose(out[2], whole[2])


# PyTorch's own operators are here, without a GPU to run them on


def test_torch_operators_have_the_schema_known_here() -> None:
    for operator, known in (("_flash_attention_forward", ATEN_FORWARD), ("_flash_attention_backward", ATEN_BACKWARD)):
        schema = getattr(torch.ops.aten, operator).default._schema
        names = [(a.name, a.kwarg_only) for a in schema.arguments]
        expected = parse_signature(known).parameters.values()
        assert names == [(p.name, p.kind is inspect.Parameter.KEYWORD_ONLY) for p in expected]


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, True), (True, False)])
def test_torch_backward_is_deterministic_and_leaves_the_mode_alone(enabled: bool, warn_only: bool) -> None:
    """The stand-in insists on the mode; what was set before comes back, and fresh memory is not filled meanwhile."""
    memory: Any = torch.utils.deterministic
    filled: list[bool] = []

    def backward(*args: Any, **kwargs: Any) -> Any:
        filled.append(memory.fill_uninitialized_memory)
        return aten_stand_in()[1](*args, **kwargs)

    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    values, work = tensors("packed", SHAPES[1])
    run(TorchCudaFlash(aten_stand_in()[0], backward), values, work)
    assert torch.are_deterministic_algorithms_enabled() is enabled
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    assert filled == [False]
    assert memory.fill_uninitialized_memory is True


def test_torch_operators_take_the_calls() -> None:
    """The real operators' fake implementations accept the adapter's arguments and give the layouts it expects."""
    seen: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.ops.aten._flash_attention_forward.default(*meta(args), **kwargs))
        return aten_stand_in()[0](*args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.ops.aten._flash_attention_backward.default(*meta(args), **kwargs))
        return aten_stand_in()[1](*args, **kwargs)

    def meta(args: Any) -> list[Any]:
        return [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]

    values, work = tensors("packed", (4, 2, 16, 16))
    run(TorchCudaFlash(forward, backward), values, work)
    (out, lse, *_), (dq, dk, dv) = seen
    assert (out.shape, lse.shape) == ((12, 4, 16), (4, 12))
    assert lse.dtype == torch.float32
    assert (dq.shape, dk.shape, dv.shape) == ((12, 4, 16), (9, 2, 16), (9, 2, 16))

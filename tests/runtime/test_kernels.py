"""Every kernel against dense attention: work lists with holes and overlaps, strides, dtypes, unequal head dims."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.work import StageWork
from megatron_fcp.runtime.kernels import KERNELS, Gradients, Kernel, Request, WorkList, capability_table, select_kernel
from megatron_fcp.runtime.kernels import reference as reference_module
from megatron_fcp.runtime.kernels import torch_cpu_flash as cpu_module

pytestmark = pytest.mark.runtime

ON_CPU = [k for k in KERNELS if k.refusal(Request(torch.device("cpu"), torch.float64, 8, 8, 4, 2)) is None]
ASK = {"head_dim_qk": 8, "head_dim_v": 8, "num_heads": 4, "num_kv_heads": 2}
CAUSAL = [(0, 3, 0, 3), (5, 6, 5, 6), (6, 17, 6, 17)]
FULL = [(1, 4, 0, 2), (4, 5, 0, 9), (9, 17, 3, 9)]  # KV ranges overlap
ANTICAUSAL = [(1, 4, 0, 3), (4, 5, 0, 9), (9, 17, 3, 16)]
# Items and what differs from a full mask.
MASKS: dict[str, tuple[list[tuple[int, int, int, int]], dict[str, Any]]] = {
    "causal": (CAUSAL, {"causal": True}),
    "full": (FULL, {}),
    "anticausal": (ANTICAUSAL, {"anticausal": True}),
    "window 0": (CAUSAL, {"causal": True, "window": 0}),
    "window 4": (CAUSAL, {"causal": True, "window": 4}),
}


def work_list(items: list[tuple[int, int, int, int]], tokens: int = 17, **mask: Any) -> WorkList:
    columns = [frozen(c) for c in zip(*items)]
    stage = StageWork(*columns, False, tokens, frozen([0]), frozen([0, tokens]))
    return WorkList.from_stage(dataclasses.replace(stage, **mask), torch.device("cpu"))


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    items: list[tuple[int, int, int, int]],
    causal: bool = False,
    anticausal: bool = False,
    window: int = 1000,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of all query rows over the union of their items, differentiable; 0 and -inf elsewhere."""
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for q0, q1, k0, k1 in items:
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                seen[q0 + i, k0 + j] = i - window <= j <= i if causal else j >= i if anticausal else True
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k) * 0.3
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1))
    return torch.einsum("qhk,khd->qhd", weights, v), lse


def tensors(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], strided: bool) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(17, heads[0], dims[0]), (17, heads[1], dims[0]), (17, heads[1], dims[1]), (17, heads[0], dims[1])]
    out = []
    for shape in shapes:
        t = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
        out.append(t.permute(2, 0, 1).contiguous().permute(1, 2, 0) if strided else t)
    return out


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8), (4, 10), (7, 7)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda k: k.name)
def test_forward_and_backward_in_fp64(
    kernel: Kernel, mask: str, heads: tuple[int, int], dims: tuple[int, int], strided: bool
) -> None:
    items, shape = MASKS[mask]
    work = work_list(items, **shape)
    q, k, v, dout = tensors(torch.float64, heads, dims, strided)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out, lse = dense(*leaves, items, **shape)
    want = torch.autograd.grad(out, leaves, dout)
    rows = torch.cat([torch.arange(q0, q1) for q0, q1, _, _ in items])

    got, got_lse = kernel.forward(q, k, v, work, 0.3)
    torch.testing.assert_close(got, out[rows].detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(got_lse, lse[rows].detach(), rtol=0, atol=1e-13)

    into = Gradients(*(torch.ones_like(t) for t in leaves))
    kernel.backward(dout, q, k, v, out.detach(), lse.detach(), work, 0.3, into)
    for name, grad, right in zip(("dq", "dk", "dv"), (into.dq, into.dk, into.dv), want):
        torch.testing.assert_close(grad.detach(), right + 1, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", ON_CPU, ids=lambda k: k.name)
def test_partial_results_keep_more_than_16_bits(kernel: Kernel, dtype: torch.dtype) -> None:
    """16-bit inputs are exact; what comes out is no coarser than float32 arithmetic."""
    work = work_list(FULL)
    q, k, v, dout = tensors(dtype, (4, 2), (8, 8), False)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = dense(*leaves, FULL)
    want = torch.autograd.grad(out, leaves, dout.double())
    rows = torch.cat([torch.arange(q0, q1) for q0, q1, _, _ in FULL])
    got, got_lse = kernel.forward(q, k, v, work, 0.3)
    torch.testing.assert_close(got.double(), out[rows].detach(), rtol=0, atol=2e-6)
    torch.testing.assert_close(got_lse.double(), lse[rows].detach(), rtol=0, atol=2e-6)
    into = Gradients(*(torch.zeros(t.shape) for t in leaves))
    kernel.backward(dout, q, k, v, out.detach().float(), lse.detach().float(), work, 0.3, into)
    for grad, right in zip((into.dq, into.dk, into.dv), want):
        torch.testing.assert_close(grad.double(), right, rtol=0, atol=5e-6)


def test_the_reference_is_the_same_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = tensors(torch.float64, (4, 2), (8, 8), False)
    for items, mask in MASKS.values():
        work = work_list(items, **mask)
        kernel, _ = select_kernel("reference", device="cpu", dtype=torch.float64, **ASK)
        results = []
        for limit in (1 << 22, 40):
            monkeypatch.setattr(reference_module, "MAX_SCORES", limit)
            out, lse = dense(q, k, v, items, **mask)
            into = Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
            kernel.backward(dout, q, k, v, out, lse, work, 0.3, into)
            results.append([*kernel.forward(q, k, v, work, 0.3), into.dq, into.dk, into.dv])
        for whole, chunked in zip(*results):
            torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("mask", "count", "most"), [({"causal": True, "window": w}, 700, None) for w in (0, 1, 63, 200, 698, 699)]
    + [({"anticausal": True}, 700, None), ({"anticausal": True}, 150, None), ({"anticausal": True}, 150, 7000)]
)  # fmt: skip
def test_long_items_are_cut_into_strips(
    monkeypatch: pytest.MonkeyPatch, mask: dict[str, Any], count: int, most: int | None
) -> None:
    """Windows shorter and longer than a strip, and strips shorter than they would be for want of room for the mask."""
    if most is not None:
        monkeypatch.setattr(cpu_module, "MAX_MASK", most)
    g = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(800, heads, 8, generator=g, dtype=torch.float64) for heads in (2, 1, 1, 2))
    work = work_list([(50, 50 + count, 20, 720)], 800, **mask)
    kernel, _ = select_kernel("torch-cpu", device="cpu", dtype=torch.float64, **ASK)
    exact, _ = select_kernel("reference", device="cpu", dtype=torch.float64, **ASK)
    results = []
    whole = torch.zeros_like(dout), torch.zeros(800, 2, dtype=torch.float64)
    for total, part in zip(whole, exact.forward(q, k, v, work, 0.3)):
        work.rows.put(total, part)
    for one in (kernel, exact):
        into = Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        one.backward(dout, q, k, v, *whole, work, 0.3, into)
        results.append([*one.forward(q, k, v, work, 0.3), into.dq, into.dk, into.dv])
    for got, want in zip(*results):
        assert not want.isnan().any()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_work_lists_refuse_what_no_mask_means() -> None:
    with pytest.raises(AssertionError, match="causal items are square"):
        work_list([(0, 2, 0, 3)], causal=True)
    with pytest.raises(AssertionError, match="sees nothing"):
        work_list([(0, 3, 0, 2)], anticausal=True)
    with pytest.raises(AssertionError, match="only causal work has a window"):
        work_list([(0, 3, 0, 3)], window=2)


def test_work_lists_refuse_empty_items() -> None:
    for bad in ([(0, 0, 0, 2)], [(0, 2, 1, 1)]):
        with pytest.raises(AssertionError, match="empty"):
            work_list(bad)


def test_work_lists_describe_packed_and_overlapping_ranges() -> None:
    packed = work_list([(0, 3, 0, 3), (5, 6, 3, 4)])
    assert packed.kv_packed
    assert packed.kv_index.numel() == 0
    assert packed.cu_seqlens_q.tolist() == [0, 3, 4]
    overlapping = work_list(FULL)
    assert not overlapping.kv_packed
    assert overlapping.kv_index.tolist() == [*range(2), *range(9), *range(3, 9)]
    assert overlapping.cu_seqlens_kv.tolist() == [0, 2, 11, 17]
    assert (overlapping.max_seqlen_q, overlapping.max_seqlen_kv) == (8, 9)
    assert overlapping.rows.index is not None
    assert overlapping.rows.index.tolist() == [1, 2, 3, 4, *range(9, 17)]


def test_auto_takes_the_first_that_can_and_says_why() -> None:
    kernel, reason = select_kernel(device="cpu", dtype=torch.bfloat16, **ASK)
    assert kernel.name == "torch-cpu"
    assert "torch.bfloat16" in reason


def test_refusals_list_every_kernel_with_its_reason() -> None:
    with pytest.raises(ValueError, match="--fcp-kernel torch-cpu cannot do") as caught:
        select_kernel("torch-cpu", device="cuda", dtype=torch.float32, **ASK)
    for kernel in KERNELS:
        assert f"{kernel.name}: " in str(caught.value)
    with pytest.raises(ValueError, match="attention kernel can do torch"):
        select_kernel(device="cpu", dtype=torch.int64, **ASK)
    with pytest.raises(ValueError, match="'flash9' is unknown; choose one of auto, "):
        select_kernel("flash9", device="cpu", dtype=torch.float32, **ASK)
    with pytest.raises(ValueError, match="4 attention heads on a rank cannot share 0 KV heads"):
        select_kernel(device="cpu", dtype=torch.float32, **{**ASK, "num_kv_heads": 0})
    with pytest.raises(ValueError, match="4 attention heads on a rank cannot share 3 KV heads"):
        select_kernel(device="cpu", dtype=torch.float32, **{**ASK, "num_kv_heads": 3})


def test_capability_table_has_a_verdict_of_every_kernel() -> None:
    table = capability_table(Request(torch.device("cpu"), torch.float32, 192, 128, 4, 2))
    assert table.keys() == {kernel.name for kernel in KERNELS}
    assert {name for name, verdict in table.items() if verdict == "yes"} == {kernel.name for kernel in ON_CPU}
    assert {"torch-cpu", "reference", "reference-fp64"} == {kernel.name for kernel in ON_CPU}

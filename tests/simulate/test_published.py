"""What others have published, and how far the simulator is from it (figures in docs/simulator.md)."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import AttentionShape
from megatron_fcp.simulate.ladder import PUBLISHED, RUNGS, ladder
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.peers import run_system
from megatron_fcp.simulate.peers.fcp import fcp_plan

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_table_2_in_order(backward: bool) -> None:
    """arXiv 2605.08524, Table 2: 128 ranks of GPU-X. Of our workloads bimodal is nearest to its trace's long tail."""
    name = "backward" if backward else "forward"
    case = Case(draw_lengths("bimodal", num_tokens=128 * 32768, seed=0), 128, 32768, load_hardware("flat5920"))
    plan = fcp_plan(case, FcpConfig(block_size=2048))  # of the paper's 2K to 6K sweet spot
    ours = ladder(plan, case, backward=backward)
    assert tuple(ours) == RUNGS
    values = list(ours.values())
    gains = np.diff(values)
    print(f"\nTable 2, {name:<18} ours   gain  published")
    for (rung, value), gain, published in zip(ours.items(), [0.0, *gains], PUBLISHED[name]):
        print(f"{rung:<26}{value:7.3f}{gain:+7.3f}{published:11.2f}")
    assert (gains > 0).all(), ours
    # The first two rungs have nothing of this planner but its placement and must be near the published ones.
    for value, published in zip(values[:2], PUBLISHED[name]):
        assert value == pytest.approx(published, abs=0.2)
    # What is left to gain is the layout's traffic: the last rung brings back part of what the fourth one pays for it.
    bare = case.efficiency(plan_program(plan, case, backward=backward), backward=backward)
    assert values[3] + 0.3 * (bare - values[3]) < values[4] < bare
    if not backward:  # the large steps are the pipeline and the order; the last step's published gain is 0.05
        assert sorted(np.argsort(gains)[-2:].tolist()) == [0, 1]
        assert gains[3] == pytest.approx(0.05, abs=0.04)


def test_blocks_of_512_tokens_reach_a_quarter() -> None:
    """The same paper: 32K tokens over 64 GPUs leave 512-token pieces, which run at 25% of a single GPU's rate."""
    case = Case(np.array([32768]), 64, 512, load_hardware("flat5920"))
    assert case.efficiency(run_system("te-ring", case)) == pytest.approx(0.25, abs=0.08)
    large = Case(np.array([4096 * 64]), 64, 4096, load_hardware("flat5920"))
    assert large.efficiency(run_system("te-ring", large)) > 0.9  # 4K pieces are the paper's sweet spot


def magi_tflops(ranks: int, *, backward: bool) -> float:
    """Median TFLOP/s per GPU over five draws, 8192 tokens per GPU, as MagiAttention's benchmark counts."""
    values = []
    for seed in range(5):
        lengths = draw_lengths("magi", num_tokens=ranks * 8192, seed=seed)
        case = Case(lengths, ranks, 8192, load_hardware("h100-ib"))
        flops = (lengths.astype(float) ** 2 / 2).sum() * case.shape.flops_per_pair * (2.5 if backward else 1)
        values.append(flops / ranks / run_system("magi", case, backward=backward).run().makespan / 1e12)
    return statistics.median(values)


def test_magi_loses_speed_with_scale() -> None:
    """MagiAttention's benchmark, H100, variable-length causal: 459 TFLOP/s forward on 8 GPUs, 237 on 64."""
    small, large = magi_tflops(8, backward=False), magi_tflops(64, backward=False)
    assert small == pytest.approx(459, rel=0.08)
    assert large < 0.9 * small
    # Known miss: the model loses 18%, the benchmark 48%. It prices neither the host's work per all-to-all nor the SMs
    # that its communication takes from the kernels.
    assert large == pytest.approx(388, rel=0.05)
    assert magi_tflops(8, backward=True) == pytest.approx(360, rel=0.08)


def test_a_ring_over_256_ranks_does_little_but_communicate() -> None:
    """ByteScale (arXiv 2502.21231): at context-parallel size 256 a micro-batch is 97.6% communication.

    Its 2M-token context leaves 8192 tokens per rank; its 7B model has as many KV heads as query heads.
    """
    case = Case(
        draw_lengths("prolong", num_tokens=256 * 8192, seed=0), 256, 8192, load_hardware("h100-ib"),
        AttentionShape(32, 32, 128),
    )  # fmt: skip
    timeline = run_system("te-ring", case).run()
    waiting = 1 - float(timeline.compute.mean()) / timeline.makespan
    assert waiting == pytest.approx(0.976, abs=0.05)

"""Backward's push rounds follow the prices of the cluster and of the heads that a plan is made for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan, with_window
from megatron_fcp.plan.cost import PushPrices
from megatron_fcp.plan.planfile import plan_from_dict, plan_to_dict, read_plan, write_plan
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import AttentionShape, load_hardware
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.workloads import draw_lengths
from megatron_fcp.testing.oracle import TOLERANCE, largest_error

pytestmark = pytest.mark.plan

LLAMA_70B, LLAMA_7B, GPT_OSS_TP8 = AttentionShape(64, 8, 128), AttentionShape(32, 32, 128), AttentionShape(8, 1, 64)


@pytest.mark.parametrize(
    ("hardware", "heads", "prices"),
    [
        # 2 * 4096 B / 45 and 300 GB/s and 10 us over 3 * 32768 FLOP / 660 TFLOP/s
        ("h100-ib", LLAMA_70B, PushPrices()),
        # 2 * 4096 B / 25 GB/s and 10 us over 3 * 32768 FLOP / 148 TFLOP/s
        ("flat5920", LLAMA_70B, PushPrices(493, 493, 15055)),
        # 2 * 16384 B / 45 and 300 GB/s and 10 us over 3 * 16384 FLOP / 660 TFLOP/s
        ("h100-ib", LLAMA_7B, PushPrices(9778, 1467, 134277)),
        # 2 * 256 B / 900 GB/s and 10 us over 3 * 2048 FLOP / 2250 TFLOP/s
        ("flat2500", GPT_OSS_TP8, PushPrices(208, 208, 3662109)),
    ],
)
def test_prices_of_clusters_and_heads(hardware: str, heads: AttentionShape, prices: PushPrices) -> None:
    assert load_hardware(hardware).cost(heads).push_prices() == prices


def test_prices_stay_in_range_whatever_the_hardware() -> None:
    cost = load_hardware("h100-ib").cost()
    assert replace(cost, inter_bytes_per_s=1e-3, latency_s=1e9).push_prices() == PushPrices(1 << 20, 183, 1 << 30)
    assert replace(cost, inter_bytes_per_s=1e30, latency_s=0.0).push_prices() == PushPrices(1, 183, 1)


@pytest.mark.parametrize(
    ("hardware", "heads", "lengths", "cp_size", "tokens_per_rank"),
    [
        ("flat5920", LLAMA_7B, [65536, 65536], 16, 8192),  # 0.64 against 0.40 of the ideal
        ("flat2500", GPT_OSS_TP8, "wlbllm", 16, 32768),  # 0.82 against 0.33
    ],
)
def test_backward_gains_by_its_own_prices(
    hardware: str, heads: AttentionShape, lengths: Any, cp_size: int, tokens_per_rank: int
) -> None:
    if isinstance(lengths, str):
        lengths = draw_lengths(lengths, num_tokens=cp_size * tokens_per_rank, seed=3)
    case = Case(np.array(lengths), cp_size, tokens_per_rank, load_hardware(hardware), heads)
    plan = fcp_plan(case)
    assert plan.fine_backward
    ours, defaults = (
        plan_program(p, case, backward=True).run().makespan for p in (plan, replace(plan, push_prices=PushPrices()))
    )
    assert ours < defaults / 1.4


@pytest.mark.parametrize(
    "prices",
    [PushPrices(1, 1, 1), PushPrices(1 << 13), PushPrices(message=1 << 24), PushPrices(1 << 20, 1 << 20, 1 << 30)],
)
def test_any_prices_give_the_right_gradients(prices: PushPrices) -> None:
    cost = replace(load_hardware("h100-ib").cost(), ranks_per_node=3)
    for seed, lengths in enumerate(([96], [50, 30, 16], [5] * 19)):
        plan = make_plan(lengths, cp_size=6, tokens_per_rank=16, config=FcpConfig(block_size=2), hardware=cost)
        plan = replace(plan, push_prices=prices)
        assert plan.fine_backward
        assert largest_error(plan, np.random.default_rng(seed)) < TOLERANCE


def priced_plan(window: int | None = None) -> Plan:
    cost = load_hardware("h100-ib").cost(LLAMA_7B)
    return make_plan([300, 212], cp_size=4, tokens_per_rank=128, hardware=cost, window=window)


@pytest.mark.parametrize("window", [None, 40])
def test_prices_are_part_of_a_plan_and_of_its_file(window: int | None, tmp_path: Path) -> None:
    plan = priced_plan(window)
    assert plan.push_prices == PushPrices(9778, 1467, 134277)
    write_plan(plan, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["push_prices"] == [9778, 1467, 134277]
    back = read_plan(tmp_path / "plan.json")
    assert (back.push_prices, back.digest) == (plan.push_prices, plan.digest)
    assert with_window(plan, 17).push_prices == plan.push_prices
    default = replace(plan, push_prices=PushPrices())
    assert default.digest != plan.digest
    assert "push_prices" not in plan_to_dict(default)


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ([9778, 1467, 134278], "changed after it was written"),
        ([8192], r"push_prices must be \[token, inside, message\], not 1 numbers"),
        ([0, 183, 65536], "a pushed token between nodes must cost 1 to 1048576 pairs, got 0"),
        ([1024, 2**20 + 1, 65536], "a pushed token inside a node must cost 1 to 1048576 pairs"),
        ([1024, 183, 2**31], "a pushed message must cost 1 to 1073741824 pairs"),
        ([1024, "183", 65536], r"push_prices\[1\] must be an integer"),
        (5, "push_prices must be a list"),
        (None, "push_prices must be a list"),
    ],
)
def test_wrong_prices_in_a_file_are_named(prices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_from_dict({**plan_to_dict(priced_plan()), "push_prices": prices})

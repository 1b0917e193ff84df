"""Slow ranks get less work and as many tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.config_file import read_config, write_config
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import load_hardware
from megatron_fcp.simulate.lower import plan_program
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.workloads import draw_lengths

pytestmark = pytest.mark.plan

RANKS, TOKENS = 32, 32768
SLOW = {5: 0.8, 20: 0.9}
COST = CostModel(5e-11, 100, 100, 4096, 45e9, 300e9, 1e-5, 8)


@pytest.mark.parametrize("workload", ["longtail", "weaktail"])
def test_a_slow_rank_gets_less_compute_and_everyone_ends_earlier(workload: str) -> None:
    lengths = draw_lengths(workload, num_tokens=RANKS * TOKENS, seed=0)
    speed = np.array([SLOW.get(r, 1.0) for r in range(RANKS)])
    slow = Case(lengths, RANKS, TOKENS, load_hardware("h100-ib"), speed=speed)
    aware, blind = fcp_plan(slow), fcp_plan(slow.replace(speed=None))
    assert (np.bincount(aware.placement.block_rank) == TOKENS // aware.table.block_size).all()
    timeline, before = plan_program(aware, slow).run(), plan_program(blind, slow).run()
    work = timeline.compute * speed
    others = np.delete(work, list(SLOW)).mean()
    for rank, factor in SLOW.items():
        assert work[rank] / others == pytest.approx(factor, abs=0.03)
    assert timeline.makespan < 0.9 * before.makespan


def test_equal_speeds_change_nothing() -> None:
    lengths = draw_lengths("longtail", num_tokens=RANKS * TOKENS, seed=1)
    plans = [
        make_plan(lengths, cp_size=RANKS, tokens_per_rank=TOKENS, hardware=replace(COST, speeds=speeds))
        for speeds in ((), (1.0,) * RANKS)
    ]
    assert plans[0].digest == plans[1].digest


def test_speeds_come_from_the_hardware_file_and_go_through_the_config_file(tmp_path: Path) -> None:
    model = replace(load_hardware("h100-ib"), speeds=(1.0, 0.8))
    model.to_yaml(tmp_path / "slow.yaml")
    assert load_hardware(str(tmp_path / "slow.yaml")) == model
    assert Case(np.array([100]), 2, 64, model).slowdown()[1] == pytest.approx(1.25)
    write_config(tmp_path / "fcp.yaml", FcpConfig(), model.cost())
    assert read_config(tmp_path / "fcp.yaml")[1] == model.cost()


def test_bad_speeds_are_named() -> None:
    with pytest.raises(ValueError, match="the speed of rank 1 must be positive, got 0"):
        replace(load_hardware("h100-ib"), speeds=(1.0, 0))
    with pytest.raises(ValueError, match="speeds for 2 ranks, but --context-parallel-size is 4"):
        make_plan([100], cp_size=4, tokens_per_rank=64, hardware=replace(COST, speeds=(1.0, 0.8)))

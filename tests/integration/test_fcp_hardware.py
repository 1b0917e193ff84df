"""Plans for a cluster's makespan, and settings from `megatron-fcp tune`, train to the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from fcp_runs import EOD, LAYOUTS, SPLIT_TENSORS, Runs, fcp

from megatron_fcp.config import FcpConfig
from megatron_fcp.config_file import write_config
from megatron_fcp.plan.planfile import read_plan
from megatron_fcp.simulate.hardware import load_hardware
from megatron_fcp.testing.loop import compare

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("hardware", ["h100-ib", "flat5920"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_for_a_cluster_equals_one_rank(runs: Runs, layout: str, hardware: str) -> None:
    result = runs(4, **fcp(layout, 4, fcp_hardware=hardware, fcp_ranks_per_node=2), **EOD)
    difference = compare(result, runs(**EOD))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


def test_tensor_parallel_ranks_share_the_plan(runs: Runs) -> None:
    result = runs(4, **fcp("resident", 2, fcp_hardware="h100-ib"), **SPLIT_TENSORS, **EOD)
    difference = compare(result, runs(**EOD))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name


def test_a_config_file_sets_what_the_command_line_does_not(runs: Runs, tmp_path: Path) -> None:
    path, plans = tmp_path / "fcp.yaml", tmp_path / "plans"
    write_config(path, FcpConfig(block_size=32, layout="resident"), load_hardware("h100-ib").cost())
    flags = {"context_parallel_backend": "fcp", "context_parallel_size": 2, "fcp_config": path}
    result = runs(2, **flags, fcp_block_size=16, fcp_save_plans=plans, **EOD)
    assert compare(result, runs(**EOD)).loss < 1e-5
    saved = [read_plan(file) for file in sorted(plans.iterdir())]
    assert saved
    assert {plan.table.block_size for plan in saved} == {16}
    assert {plan.ranks_per_node for plan in saved} == {8}

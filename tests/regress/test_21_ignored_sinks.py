"""An attention sink that a path drops in silence; one that starts at zero hides that it was ignored, or half of it.

https://github.com/NVIDIA/TransformerEngine/issues/2541, https://github.com/NVIDIA/TransformerEngine/issues/3551
"""

from __future__ import annotations

import dataclasses

import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.testing.attention_check import Model, check_in_threads, random_inputs, right_answer

pytestmark = pytest.mark.runtime

SINK = Model(sink=5.0)


def plan_of(cp_size: int, window: int | None) -> Plan:
    config = FcpConfig(block_size=4)
    return make_plan([19, 1, 7, 3], cp_size=cp_size, tokens_per_rank=32 // cp_size, config=config, window=window)


@pytest.mark.parametrize("kernel", ["auto", "reference", "reference-fp64"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_sink_of_five_is_felt_in_everything(cp_size: int, window: int | None, kernel: str) -> None:
    plan, model = plan_of(cp_size, window), dataclasses.replace(SINK, kernel=kernel)
    x = random_inputs(plan, model, 0)
    got = check_in_threads(plan, model, x=x)  # equals dense attention: out, dq, dk, dv and the sink's own gradient
    without = right_answer(plan, dataclasses.replace(model, sink=None), x)
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(got, name) - getattr(without, name)).abs().max() > 0.1, name
    assert got.dsink is not None
    assert got.dsink.abs().max() > 0.1
    assert (got.dsink != 0).all(), "the gradient of a head's sink is missing"


@pytest.mark.parametrize("cp_size", [1, 4])
def test_a_sink_of_zero_is_not_none(cp_size: int) -> None:
    plan, model = plan_of(cp_size, None), Model(sink=0.0)
    x = random_inputs(plan, model, 1)
    got = check_in_threads(plan, model, x=x)
    without = right_answer(plan, Model(), x)
    assert (got.out - without.out).abs().max() > 0.1

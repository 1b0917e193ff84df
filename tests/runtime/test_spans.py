"""Steps have names in a profile, and NCCL groups their options; both without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.runtime.groups import make_groups, nccl_options
from megatron_fcp.runtime.spans import name_of, span
from megatron_fcp.testing.attention_check import Model, random_inputs, run_rank
from megatron_fcp.testing.threads import run_ranks

pytestmark = pytest.mark.runtime


def test_a_profile_names_every_step_of_both_passes() -> None:
    plan = make_plan([60, 4], cp_size=1, tokens_per_rank=64, config=FcpConfig(block_size=16))
    model = Model()
    x = random_inputs(plan, model, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_ranks(1, lambda comm: run_rank(comm, plan, model, x))
    names = {event.name for event in profile.events()}
    assert {"fcp forward: stage 0", "fcp backward: stage 0"} <= names


def test_names() -> None:
    plan = make_plan([100, 28], cp_size=2, tokens_per_rank=64, config=FcpConfig(block_size=16))
    backward = [name_of(step) for step in plan.rank_plan(1).backward + plan.rank_plan(0).backward]
    for expected in ("pull round 0", "stage 0", "stage 1", "push round 0", "reduce round 0"):
        assert expected in backward, backward


def test_without_a_profiler_a_step_has_no_name() -> None:
    step = make_plan([16], cp_size=1, tokens_per_rank=16).rank_plan(0).forward[0]
    assert span("forward", step) is span("backward", step)


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="this torch is built without NCCL")
def test_nccl_options() -> None:
    plain, limited = nccl_options(), nccl_options(8)
    assert plain.is_high_priority_stream
    assert limited.is_high_priority_stream
    assert limited.config.max_ctas == 8
    assert plain.config.max_ctas != 8
    with pytest.raises(ValueError, match="limit of NCCL CTAs"):
        nccl_options(0)


def test_a_torch_without_options_falls_back_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    class Backend:
        pass

    Backend.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    with pytest.warns(UserWarning, match="the limit of 4 is ignored; NCCL_MAX_CTAS"):
        assert nccl_options(4).is_high_priority_stream
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    with pytest.warns(UserWarning, match="no options for NCCL groups"):
        assert nccl_options() is None


def test_ranks_must_ascend() -> None:
    with pytest.raises(ValueError, match="must ascend"):
        make_groups([1, 0], 1.0, "test", torch.device("cpu"), None)

"""Communicators are made per layer, per plan or per peer, and their buffers eat the memory that training needs.

https://github.com/NVIDIA/nccl/issues/1685, https://github.com/NVIDIA/TransformerEngine/issues/3420
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.runtime import Communicator
from megatron_fcp.testing.attention_check import Model, random_inputs, run_rank
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.loop import TrainingJob as Job
from megatron_fcp.testing.loop import TrainingLoop, tiny_model_args

MODEL = Model(num_heads=1, num_kv_heads=1, head_dim_qk=4, head_dim_v=4)


def attend(comm: Communicator, plans: list[tuple[list[int], int]]) -> tuple[int, int, int]:
    """Runs in a rank: process groups before and after attention over several plans, and the peers it talked to."""
    before = len(dist.distributed_c10d._world.pg_map)
    peers: set[int] = set()
    for lengths, block_size in plans:
        config = FcpConfig(block_size=block_size)
        plan = make_plan(lengths, cp_size=comm.size, tokens_per_rank=16, config=config)
        run_rank(comm, plan, MODEL, random_inputs(plan, MODEL, 0))
        for stage in plan.rank_plan(comm.rank).forward:
            peers |= {transfer.peer for transfer in (*getattr(stage, "sends", ()), *getattr(stage, "recvs", ()))}
    return before, len(dist.distributed_c10d._world.pg_map), len(peers)


@pytest.mark.runtime
def test_plans_and_peers_make_no_group(gloo: GlooPool) -> None:
    plans = [([64], 4), ([40, 24], 2), ([1] * 64, 4), ([5, 50, 9], 8)]
    results = gloo.run(4, attend, plans)
    assert all(before == after for before, after, _ in results)
    assert max(peers for *_, peers in results) == 3, "the plans should make ranks talk to every other one"


def count_groups() -> None:
    """Runs in a rank: notes every process group that FCP makes, and the plans and layers of the run."""
    from megatron_fcp.integration import layouts, session
    from megatron_fcp.testing.loop_rank import note

    groups: list[str] = []
    plans: set[str] = set()
    note("groups", groups)
    note("plans", plans)
    new_group, init, begin = dist.new_group, layouts.Layout.__init__, session.begin

    def counted(*args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("group_desc") or ""
        if name.startswith("context parallel"):
            groups.append(name)
        return new_group(*args, **kwargs)

    def planned(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        plans.add(self.digest)

    def noted(settings: Any) -> Any:
        run = begin(settings)
        note("run", _Layers(run))
        return run

    dist.new_group = counted
    layouts.Layout.__init__ = planned
    session.begin = noted


class _Layers:
    """The number of a run's attention layers, when it is sent home."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __reduce__(self) -> Any:
        return int, (self._run.attention_layers,)


@pytest.mark.megatron
def test_a_run_makes_one_group(training_loop: TrainingLoop) -> None:
    flags = {
        "num_layers": 4,
        "context_parallel_size": 2,
        "context_parallel_backend": "fcp",
        "fcp_layout": "resident",
        "fcp_block_size": 8,
        "fcp_plan_ahead": 0,  # plans in this process, where they are counted
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "mock_data": None,
        "data_path": training_loop.corpus().prefix,
    }
    job = Job(tiny_model_args(**flags), 2, before=("test_30_many_communicators:count_groups",))
    for rank in training_loop.run(job).ranks:
        assert rank.notes["groups"] == ["context parallel transfers"]
        assert rank.notes["run"] == 4, "attention layers"
        assert len(rank.notes["plans"]) > 4, "batches of different documents have different plans"

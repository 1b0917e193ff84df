"""The figures of a plan, derived by hand for one small enough, and the picture."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Placement, Plan, build_block_table, make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.report import TierTraffic, report
from megatron_fcp.plan.schedule import schedule_rounds
from megatron_fcp.plan.transfers import coalesce, needed_blocks
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.plan


def one_document(ranks_per_node: int) -> Plan:
    """16 tokens in 4 blocks; rank r owns block 3 - r and so needs the 3 - r blocks before it."""
    table = build_block_table([16], num_tokens=16, block_size=4)
    placement = Placement(4, frozen([3, 2, 1, 0]))
    messages = coalesce(*needed_blocks(table, placement), placement, 1)
    schedule = schedule_rounds(messages, 4, ranks_per_node=ranks_per_node, rounds_per_stage=1)
    return Plan(table, placement, schedule, ranks_per_node)


def test_figures_of_one_document_on_four_ranks() -> None:
    r = report(one_document(1), num_kv_heads=2, head_dim=8, dtype_bytes=2)
    assert (r.num_documents, r.real_tokens, r.num_blocks, r.tokens_per_rank) == (1, 16, 4, 4)
    assert (r.real_tokens_min, r.real_tokens_max) == (4, 4)
    assert r.pairs_max == 13 + 14 + 15 + 16
    assert r.pairs_mean == (16 * 17 / 2) / 4
    assert r.compute_imbalance == 58 / 34
    assert (r.rounds, r.rounds_lower_bound, r.num_messages, r.stages_max) == (3, 3, 3 + 2 + 1, 4)
    assert r.push_rounds == 3
    assert r.kv_tokens == 4 * (3 + 2 + 1)
    assert r.ring_kv_tokens == 3 * 16
    assert r.kv_token_bytes == 2 * 2 * 8 * 2
    assert (r.kv_megabytes, r.ring_megabytes) == (24 * 64 / 1e6, 48 * 64 / 1e6)
    assert r.traffic == (TierTraffic("between nodes", 6.0, 12, 6.0, 12),)
    assert r.held_kv_tokens_forward == r.held_kv_tokens_backward == 8  # two stages of one block
    assert r.forward_bytes == 8 * 64


def test_traffic_by_tier() -> None:
    # Nodes {0, 1} and {2, 3}. Inside: block 2 from 1 to 0, block 0 from 3 to 2. Between: blocks 0 and 1 to 0 and to 1.
    r = report(one_document(2))
    assert r.traffic == (TierTraffic("inside nodes", 2.0, 4, 2.0, 4), TierTraffic("between nodes", 4.0, 8, 4.0, 8))
    assert report(one_document(4)).traffic == (TierTraffic("inside nodes", 6.0, 12, 6.0, 12),)


def test_memory_is_that_of_the_busiest_rank() -> None:
    plan = make_plan([200, 56], cp_size=4, tokens_per_rank=64, config=FcpConfig(block_size=8))
    r = report(plan, num_kv_heads=3, head_dim=5, dtype_bytes=2)
    ranks = [plan.rank_plan(rank) for rank in range(4)]
    assert r.forward_bytes == max(p.peak_forward.kv_tokens for p in ranks) * 2 * 3 * 5 * 2
    assert r.backward_bytes == max(
        p.peak_backward.kv_tokens * 2 * 3 * 5 * 2 + p.peak_backward.dkv_tokens * 2 * 3 * 5 * 4 for p in ranks
    )


def test_nothing_moves_where_nothing_must() -> None:
    alone = report(make_plan([5, 9], cp_size=1, tokens_per_rank=16, config=FcpConfig(block_size=4)))
    assert (alone.rounds, alone.kv_tokens, alone.ring_kv_tokens, alone.forward_bytes) == (0, 0, 0, 0)
    padding = report(make_plan([], cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=4)))
    assert (padding.compute_imbalance, padding.pairs_max, padding.kv_tokens) == (1.0, 0, 0)
    assert padding.real_tokens_max == 0


def test_traffic_adds_up() -> None:
    import numpy as np

    for seed in range(100):
        plan = random_case(np.random.default_rng(seed)).plan()
        r = report(plan)
        assert sum(t.received_mean for t in r.traffic) * plan.cp_size == pytest.approx(r.kv_tokens)
        assert sum(t.sent_mean for t in r.traffic) * plan.cp_size == pytest.approx(r.kv_tokens)
        assert r.kv_tokens <= r.ring_kv_tokens
        assert r.rounds == r.rounds_lower_bound


def test_figures_are_json() -> None:
    r = report(one_document(2))
    loaded = json.loads(json.dumps(r.to_dict()))
    assert loaded["compute_imbalance"] == r.compute_imbalance
    assert loaded["traffic"][0]["name"] == "inside nodes"
    assert set(loaded) >= {field.name for field in dataclasses.fields(r)}


@pytest.mark.parametrize(
    ("cp_size", "ranks_per_node", "lengths"), [(1, 1, [9]), (4, 1, [40]), (8, 4, []), (64, 8, [900])]
)
def test_pictures_show_every_block_and_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cp_size: int, ranks_per_node: int, lengths: list[int]
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatron_fcp.commands.picture import placement_picture

    config = FcpConfig(block_size=4, ranks_per_node=ranks_per_node)
    plan = make_plan(lengths, cp_size=cp_size, tokens_per_rank=16, config=config)
    saved: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k))[1])
    placement_picture(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

    documents, owners, load, rounds = saved[0].axes
    assert all(isinstance(axes, Axes) for axes in saved[0].axes)
    assert sum(len(c.get_paths()) for c in documents.collections) == len(lengths)
    assert sum(len(c.get_paths()) for c in owners.collections) == plan.table.num_blocks
    assert len(load.patches) == cp_size
    assert sum(len(c.get_paths()) for c in rounds.collections) == len(plan.schedule.messages)

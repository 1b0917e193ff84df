"""Windows: what they hide, what they spare, and that the work lists say exactly that."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fcp.cli import main
from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan, with_window
from megatron_fcp.plan.blocks import build_block_table
from megatron_fcp.plan.planfile import plan_from_dict, plan_to_dict, read_plan, write_plan
from megatron_fcp.plan.strips import place_strips
from megatron_fcp.simulate.hardware import PRESETS
from megatron_fcp.testing.audit import audit
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.strategies import windowed_cases
from megatron_fcp.testing.streams import Case, edge_lengths, edge_windows

pytestmark = pytest.mark.plan

BLOCK = 4
LENGTHS = edge_lengths(BLOCK)


def visible(plan: Plan) -> np.ndarray:
    """Which key each query of the stream sees, token by token; shape [num_tokens, num_tokens]."""
    documents = plan.table.token_documents()
    index = np.arange(documents.size)
    before = index[:, None] - index[None, :]
    same = (documents[:, None] == documents[None, :]) & (documents[:, None] >= 0)
    window = documents.size if plan.table.window is None else plan.table.window
    return same & (before >= 0) & (before <= window)


def received(plan: Plan) -> set[tuple[int, int]]:
    m = plan.schedule.messages
    return set(zip(np.repeat(m.dst, np.diff(m.ptr)).tolist(), m.block.tolist()))


def needed(plan: Plan) -> set[tuple[int, int]]:
    """(rank, remote block) pairs in which a query sees a key, token by token."""
    size, owner = plan.table.block_size, plan.placement.block_rank
    query, key = np.nonzero(visible(plan))
    pairs = zip(owner[query // size].tolist(), (key // size).tolist())
    return {(rank, block) for rank, block in pairs if owner[block] != rank}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(windowed_cases(), st.integers(0, 2**32 - 1))
def test_a_windowed_plan_computes_what_dense_attention_does(case: Case, seed: int) -> None:
    plan = case.plan()
    audit(case, plan)
    assert largest_error(plan, np.random.default_rng(seed)) < TOLERANCE


@settings(max_examples=60, deadline=None, derandomize=True)
@given(windowed_cases())
def test_exactly_the_blocks_that_a_window_reaches_are_moved(case: Case) -> None:
    plan = case.plan()
    assert received(plan) == needed(plan)
    for block in range(plan.table.num_blocks):  # and of those no token that nobody sees
        start, stop = int(plan.table.shared_start[block]), int(plan.table.shared_stop[block])
        edge = block * plan.table.block_size
        seen = visible(plan)[edge + plan.table.block_size :, edge : edge + plan.table.block_size].any(axis=0)
        assert np.array_equal(np.flatnonzero(seen) + edge, np.arange(start, stop))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(windowed_cases())
def test_work_lists_cover_every_visible_pair_once(case: Case) -> None:
    plan = case.plan()
    total = int(visible(plan).sum())
    assert plan.table.block_cost.sum() == total
    forward = backward = 0
    for rank_plan in map(plan.rank_plan, range(plan.cp_size)):
        forward += sum(call.pairs for calls in rank_plan.calls for call in calls)
        backward += sum(call.pairs for parts in rank_plan.parts for calls in parts for call in calls)
        for calls in rank_plan.calls:
            assert 1 <= len(calls) <= 3
            kinds = [("causal" if c.causal else "anticausal" if c.anticausal else "full") for c in calls if c.num_items]
            assert len(set(kinds)) == len(kinds)
            around = [np.concatenate([np.arange(a, b) for a, b in zip(c.q_start, c.q_stop)]) for c in calls
                      if c.num_items and not c.causal]  # fmt: skip
            rows = np.concatenate(around) if around else np.zeros(0, dtype=int)
            assert np.unique(rows).size == rows.size, "a query occurs twice"
    assert forward == backward == total


@pytest.mark.parametrize("length", sorted({1, *LENGTHS} - {0}))
@pytest.mark.parametrize("window", edge_windows(BLOCK, 13))
def test_edges(window: int, length: int) -> None:
    """A document that starts anywhere in a block, in blocks on ranks in turn, so that every block pair is remote."""
    for gap in range(BLOCK):
        config = FcpConfig(block_size=BLOCK)
        plan = make_plan([length], starts=[gap], cp_size=4, tokens_per_rank=BLOCK, config=config, window=window)
        assert received(plan) == needed(plan)
        assert largest_error(plan, np.random.default_rng(gap)) < TOLERANCE


def test_a_window_beyond_every_document_changes_nothing() -> None:
    config = FcpConfig(block_size=BLOCK)
    whole = make_plan([37, 3, 20], cp_size=4, tokens_per_rank=16, config=config)
    windowed = with_window(whole, 36)
    assert received(windowed) == received(whole)
    assert windowed.table.block_cost.tolist() == whole.table.block_cost.tolist()
    assert received(with_window(whole, 35)) == received(whole)  # the last query still sees the first block
    assert with_window(whole, 35).table.block_cost.sum() == whole.table.block_cost.sum() - 1


def test_both_kinds_of_layers_share_one_placement() -> None:
    config = FcpConfig(block_size=BLOCK, blocks_per_message=2, ranks_per_node=2)
    whole = make_plan([50, 9], cp_size=4, tokens_per_rank=16, config=config)
    windowed = with_window(whole, 5, config)
    assert windowed.placement is whole.placement
    assert windowed.ranks_per_node == 2
    assert received(windowed) < received(whole)
    for rank in range(4):
        index = [plan.rank_plan(rank).local_token_global_indices.tolist() for plan in (whole, windowed)]
        assert index[0] == index[1]
    assert with_window(windowed, 5) is windowed
    back = with_window(windowed, None, config)
    assert back.digest == whole.digest


def test_digest_tells_windows_apart() -> None:
    config = FcpConfig(block_size=BLOCK)
    digests = {make_plan([3, 2], cp_size=2, tokens_per_rank=4, config=config, window=w).digest for w in (None, 2, 3)}
    assert len(digests) == 3


def test_long_documents_are_cut_into_one_strip_per_rank() -> None:
    table = build_block_table([4096], num_tokens=4096, block_size=16, window=100)
    placement = place_strips(table, 8)
    assert placement.block_rank.tolist() == [block // 32 for block in range(256)]
    plan = make_plan([4096], cp_size=8, tokens_per_rank=512, config=FcpConfig(block_size=16), window=100)
    m = plan.schedule.messages
    assert sorted(zip(m.src.tolist(), m.dst.tolist())) == [(r, r + 1) for r in range(7)]  # from the neighbour alone
    assert plan.schedule.num_rounds == 1


def test_many_short_documents_are_balanced_by_shorter_strips() -> None:
    """Half of the stream costs 4 pairs per token and half 257: one strip per rank would be all cheap or all dear."""
    lengths = [8] * 512 + [4096]
    table = build_block_table(lengths, num_tokens=8192, block_size=32, window=256)
    placement = place_strips(table, 8, pairs_per_token=1)
    load = placement.rank_cost(table)
    assert load.max() < 1.1 * load.mean()
    stream = np.arange(256) // 32
    assert np.bincount(stream, weights=table.block_cost).max() > 1.9 * load.mean()  # what equal pieces would give
    assert np.bincount(placement.block_rank).tolist() == [32] * 8
    # Where the network is slow, what does not travel counts for more.
    slow = place_strips(table, 8, pairs_per_token=1e6)
    assert (np.diff(slow.block_rank) != 0).sum() < (np.diff(placement.block_rank) != 0).sum()


@pytest.mark.parametrize("name", ["h100-ib", "flat5920"])
def test_windows_on_hardware(name: str) -> None:
    cost = PRESETS[name].cost()
    lengths = [30000, 100, 2000, 500]
    plan = make_plan(lengths, cp_size=16, tokens_per_rank=2048, hardware=cost, window=1000)
    assert plan.ranks_per_node == cost.ranks_per_node
    assert received(plan) == needed_blockwise(plan, lengths, 1000)
    mixed = with_window(make_plan(lengths, cp_size=16, tokens_per_rank=2048, hardware=cost), 1000)
    assert received(mixed) == needed_blockwise(mixed, lengths, 1000)


def needed_blockwise(plan: Plan, lengths: list[int], window: int) -> set[tuple[int, int]]:
    size, owner = plan.table.block_size, plan.placement.block_rank.tolist()
    out: set[tuple[int, int]] = set()
    for start, length in zip(itertools.accumulate([0, *lengths]), lengths):
        for block in range(start // size, (start + length - 1) // size + 1):
            since = max(start, max(start, block * size) - window) // size
            out |= {(owner[block], b) for b in range(since, block) if owner[b] != owner[block]}
    return out


def test_plan_files_carry_the_window(tmp_path: Path) -> None:
    config = FcpConfig(block_size=BLOCK)
    plan = make_plan([30, 9], starts=[1, 40], cp_size=4, tokens_per_rank=16, config=config, window=6)
    write_plan(plan, tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert (stored["format"], stored["window"]) == ("fcp-plan/2", 6)
    back = read_plan(tmp_path / "plan.json")
    assert back.digest == plan.digest
    assert back.table.window == 6
    assert plan_to_dict(with_window(plan, None))["format"] == "fcp-plan/1"
    assert "window" not in plan_to_dict(with_window(plan, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fcp-plan/1"}, "the key 'window' is unknown"),
        ({"window": None}, r"window\[0\] must be an integer"),
        ({"window": -1}, "the window must be an integer of at least 0, got -1"),
        ({"window": 7}, "changed after it was written"),
        ({"window": 30}, "needs block 0 and never receives it"),
        ({"mask": "full"}, "a window of 6 tokens needs a causal mask"),
    ],
)
def test_a_changed_window_is_noticed(change: dict[str, object], message: str) -> None:
    plan = make_plan([31], cp_size=4, tokens_per_rank=8, config=FcpConfig(block_size=BLOCK), window=6)
    with pytest.raises(ValueError, match=message):
        plan_from_dict({**plan_to_dict(plan), **change})


def test_version_2_needs_its_window() -> None:
    plan = make_plan([31], cp_size=4, tokens_per_rank=8, config=FcpConfig(block_size=BLOCK), window=6)
    content = plan_to_dict(plan)
    del content["window"]
    with pytest.raises(ValueError, match="the key 'window' is missing"):
        plan_from_dict(content)


def test_a_plan_that_lacks_a_block_of_the_window_is_refused() -> None:
    short = make_plan([31], cp_size=4, tokens_per_rank=8, config=FcpConfig(block_size=BLOCK), window=4)
    longer = build_block_table([31], num_tokens=32, block_size=BLOCK, window=5)
    with pytest.raises(ValueError, match=r"rank 1 needs block 0 and never receives it"):
        dataclasses.replace(short, table=longer)


@pytest.mark.parametrize(
    ("window", "config", "message"),
    [
        (-1, FcpConfig(), "the window must be an integer of at least 0, got -1"),
        (2.0, FcpConfig(), "the window must be an integer"),
        (2**40, FcpConfig(), "past the limit"),
        (3, FcpConfig(mask="full"), "a window of 3 tokens needs a causal mask, not 'full'"),
    ],
)
def test_bad_windows(window: int, config: FcpConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan([8], cp_size=2, tokens_per_rank=4, config=config, window=window)


def test_the_command_takes_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths").write_text("30\n9\n")
    argv = ["plan", "--lengths", str(tmp_path / "lengths"), "--cp-size", "4", "--tokens-per-rank", "16"]
    argv += ["--block-size", "4", "--window", "6"]
    assert main([*argv, "--out", str(tmp_path / "plan.json")]) == 0
    assert "causal mask, window 6" in capsys.readouterr().out
    want = make_plan([30, 9], cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=BLOCK), window=6)
    assert read_plan(tmp_path / "plan.json").digest == want.digest
    assert main(["plan", "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["window"] == 6
    for bad, message in (
        ([*argv, "--mask", "full"], "--window 6 looks back from a query; leave out --mask full"),
        ([*argv[:-1], "-1"], "argument --window: must be an integer from 0"),
    ):
        try:
            status = main(bad)
        except SystemExit as stop:
            status = stop.code
        assert status == 2
        assert message in capsys.readouterr().err

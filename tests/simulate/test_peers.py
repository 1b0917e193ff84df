"""Peers conserve work, move what their sources say, and meet each other where they are the same thing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_fcp.simulate import HardwareModel, draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.hardware import AttentionShape
from megatron_fcp.simulate.peers import SYSTEMS, check_systems, run_system
from megatron_fcp.simulate.peers.ring import BACKWARD_TRAFFIC
from megatron_fcp.simulate.peers.wlb import document_seconds

pytestmark = pytest.mark.plan

N, TOKENS = 16, 8192


def rimless(name: str) -> HardwareModel:
    """Kernels cost their area only, so that no way to cut changes the sum."""
    return dataclasses.replace(load_hardware(name), q_half=1e-9, kv_half=1e-9)


def whole_chunks(seed: int) -> np.ndarray:
    """Lengths that need no padding in any peer."""
    lengths = draw_lengths("longtail", num_tokens=N * TOKENS, seed=seed) // (2 * N) * (2 * N)
    return lengths[lengths > 0]


@pytest.mark.parametrize("hardware", ["flat5920", "h100-ib"])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("backward", [False, True])
def test_all_systems_do_the_same_work(system: str, hardware: str, backward: bool) -> None:
    case = Case(whole_chunks(1), N, TOKENS, rimless(hardware))
    timeline = run_system(system, case, backward=backward).run()
    # ByteScale's model may cut a document that fits no rank; the pieces then lose the pairs between them.
    assert timeline.compute.sum() / N == pytest.approx(
        case.ideal(backward=backward), rel=0.02 if system == "bytescale" else 1e-6
    )
    assert timeline.makespan >= timeline.compute.max() * (1 - 1e-12)


def test_a_ring_moves_everything_everywhere() -> None:
    case = Case(whole_chunks(2), N, TOKENS, load_hardware("flat5920"))
    kv = int(case.lengths.sum()) // N * case.forward.kv_bytes
    forward = run_system("te-ring", case).run().bytes_moved(1, sends=False)
    backward = run_system("te-ring", case, backward=True).run().bytes_moved(1, sends=False)
    np.testing.assert_array_equal(forward, (N - 1) * kv)
    np.testing.assert_array_equal(backward, BACKWARD_TRAFFIC * (N - 1) * kv)


def test_a_node_gathers_each_block_once_over_the_network() -> None:
    case = Case(whole_chunks(2), N, TOKENS, load_hardware("h100-ib"))
    timeline = run_system("all-gather", case).run()
    kv, node = TOKENS * case.forward.kv_bytes, case.hardware.ranks_per_node
    np.testing.assert_array_equal(timeline.bytes_moved(1, sends=False), (N - node) * kv // node)
    np.testing.assert_array_equal(timeline.bytes_moved(0, sends=False), (N - 1) * kv)


def test_documents_that_fit_a_rank_need_no_group() -> None:
    case = Case(np.full(N * 4, TOKENS // 4), N, TOKENS, load_hardware("h100-ib"))
    for system in ("bytescale", "dynamic-cp", "magi", "fcp"):
        timeline = run_system(system, case).run()
        assert timeline.bytes_moved(0, sends=True).sum() == timeline.bytes_moved(1, sends=True).sum() == 0, system
        assert case.ideal() / timeline.makespan == pytest.approx(1.0), system


def test_one_document_over_all_ranks_is_the_same_ring_for_all_who_use_rings() -> None:
    case = Case(np.array([N * TOKENS]), N, TOKENS, load_hardware("h100-ib"))
    spans = [run_system(s, case).run().makespan for s in ("te-ring", "bytescale", "dynamic-cp")]
    np.testing.assert_allclose(spans, spans[0])


def test_ulysses_alone_where_heads_suffice() -> None:
    case = Case(whole_chunks(3)[:20], 8, 4 * TOKENS, load_hardware("h100-ib"))
    assert len(run_system("usp", case).run().compute) == 8
    mine = run_system("usp", case).run()
    assert mine.imbalance == pytest.approx(1.0)
    # Q, K and V go to the heads and the output comes back: 7/8 of it leaves the rank.
    shape = AttentionShape()
    q = shape.num_heads * shape.head_dim * shape.bytes_per_element
    expected = 2 * (4 * TOKENS * (q + shape.kv_bytes_per_token // 2) * 7 // 8)
    assert mine.bytes_moved(0, sends=True)[0] == pytest.approx(expected, rel=1e-6)


def test_wlb_takes_the_better_sharding() -> None:
    for lengths in (np.full(N * 64, TOKENS // 64), np.array([N * TOKENS])):
        case = Case(lengths, N, TOKENS, load_hardware("flat5920"))
        alone = run_system("all-gather", case).run().compute.max()
        per_document = document_seconds(case, backward=False).max()
        assert run_system("wlb-llm", case).run().compute.max() == pytest.approx(min(alone, per_document))


def test_magi_sends_a_node_each_chunk_once() -> None:
    case = Case(np.array([N * TOKENS]), N, TOKENS, load_hardware("h100-ib"))
    timeline = run_system("magi", case).run()
    everything = N * TOKENS * case.forward.kv_bytes
    assert timeline.bytes_moved(1, sends=False).sum() <= everything  # two nodes: each fetches at most the other's half


def test_unknown_systems_are_named() -> None:
    with pytest.raises(ValueError, match=r"--systems 'rung' is unknown; choose from fcp, "):
        check_systems(["fcp", "rung"])


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("cp_size", "ranks_per_node"), [(1, 1), (3, 1), (6, 4)])  # the last: a node of two ranks
def test_odd_rank_counts_and_one_rank(system: str, cp_size: int, ranks_per_node: int) -> None:
    hardware = dataclasses.replace(load_hardware("flat5920"), ranks_per_node=ranks_per_node)
    lengths = [5, 700, 3000, 16, *([9000, 11000] if cp_size == 6 else [])]
    case = Case(np.array(lengths), cp_size, 4096, hardware)
    for backward in (False, True):
        timeline = run_system(system, case, backward=backward).run()
        assert 0 < case.ideal(backward=backward) / timeline.makespan <= 1 + 1e-9

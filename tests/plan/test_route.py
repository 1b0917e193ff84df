"""Redistribution of tokens: fewest rounds, nobody sends or receives twice in one, every token goes where it should."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fcp.plan import make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.route import make_route
from megatron_fcp.plan.sharding import zigzag

pytestmark = pytest.mark.plan


@given(st.integers(1, 9), st.integers(0, 60), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=150, deadline=None)
def test_routes_are_permutations_in_fewest_rounds(cp_size: int, total: int, random, skip: bool) -> None:
    def layout() -> list[np.ndarray]:
        tokens = random.sample(range(total), total)
        cuts = sorted(random.randint(0, total) for _ in range(cp_size - 1))
        return [frozen(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, total])]

    source, destination = layout(), layout()
    skipped = [t for t in range(total) if random.random() < 0.3] if skip else []
    route = make_route(source, destination, skipped=frozen(skipped))
    ranks = [route.rank_route(r) for r in range(cp_size)]
    stream = np.arange(total) + 100
    held = [stream[i] for i in source]
    got = [np.zeros(i.size, dtype=np.int64) for i in destination]
    degree = np.zeros((2, cp_size), dtype=int)
    for me, rank in enumerate(ranks):
        got[me][rank.stay_destination] = held[me][rank.stay_source]
        assert len(rank.rounds) == route.num_rounds
        for i, r in enumerate(rank.rounds):
            degree[0, me] += r.send_peer >= 0
            degree[1, me] += r.recv_peer >= 0
            assert me not in (r.send_peer, r.recv_peer)
            if r.recv_peer >= 0:
                theirs = ranks[r.recv_peer].rounds[i]
                assert theirs.send_peer == me
                assert r.recv_index.size > 0, "an empty message"
                got[me][r.recv_index] = held[r.recv_peer][theirs.send_index]
    assert route.num_rounds == degree.max(initial=0), "as many rounds as the busiest rank has messages"
    for me, index in enumerate(destination):
        assert (got[me] == np.where(np.isin(index, skipped), 0, stream[index])).all()
        back = ranks[me].reverse()
        assert (back.num_source, back.num_destination) == (index.size, source[me].size)
        again = back.reverse()
        assert all((a.send_index == b.send_index).all() for a, b in zip(again.rounds, ranks[me].rounds))


def test_megatrons_zigzag_to_a_plan() -> None:
    plan = make_plan([40, 20], cp_size=4, tokens_per_rank=16)
    inside = [plan.rank_plan(r).local_token_global_indices for r in range(4)]
    route = make_route(zigzag(64, 4), inside)
    moved = sum(route.rank_route(r).sent_tokens for r in range(4))
    stay = sum(np.intersect1d(a, b).size for a, b in zip(zigzag(64, 4), inside))
    assert moved == 64 - stay


def test_layouts_that_are_no_permutation_are_refused() -> None:
    a, b = frozen([0, 1]), frozen([2, 3])
    with pytest.raises(ValueError, match="one layout is for 2 ranks, the other for 1"):
        make_route([a, b], [a])
    with pytest.raises(ValueError, match="no rank holds token 3"):
        make_route([a, frozen([2, 2])], [a, b])
    with pytest.raises(ValueError, match="rank 1 holds a token outside the stream of 4 tokens"):
        make_route([a, b], [a, frozen([2, 4])])
    with pytest.raises(ValueError, match="one layout has 4 tokens, the other 3"):
        make_route([a, b], [a, frozen([2])])

"""Ten thousand random plans: fewest possible rounds, every rule by its definition, and the right attention."""

import numpy as np
import pytest

from megatron_fcp.plan.schedule import rounds_lower_bound
from megatron_fcp.testing.audit import audit
from megatron_fcp.testing.forwarding import reroute, with_random_stages
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.plan

PLANS, CHUNKS = 10_000, 20
REROUTED, REROUTED_CHUNKS = 1_500, 5


def chunk_of(seeds: int, chunks: int, chunk: int) -> range:
    return range(seeds * chunk // chunks, seeds * (chunk + 1) // chunks)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_plans_are_round_optimal_valid_and_right(chunk: int) -> None:
    for seed in chunk_of(PLANS, CHUNKS, chunk):
        rng = np.random.default_rng([1, seed])
        case = random_case(rng, max_cp_size=13 if seed % 10 == 0 else 6)
        plan = case.plan()
        degree = audit(case, plan)
        assert plan.schedule.num_rounds == degree, (seed, case)
        assert rounds_lower_bound(plan.schedule.messages, plan.ranks_per_node) == degree, (seed, case)
        window = None if seed % 2 else 1
        assert largest_error(plan, rng, window=window) < TOLERANCE, (seed, case, window)


@pytest.mark.parametrize("chunk", range(REROUTED_CHUNKS))
def test_any_valid_plan_executes(chunk: int) -> None:
    for seed in chunk_of(REROUTED, REROUTED_CHUNKS, chunk):
        rng = np.random.default_rng([2, seed])
        case = random_case(rng)
        rewrite = with_random_stages if seed % 3 == 0 else reroute
        plan = rewrite(case.plan(), rng)
        audit(case, plan)
        window = (None, 1, 2)[seed % 3 if seed % 2 else 0]
        assert largest_error(plan, rng, window=window) < TOLERANCE, (seed, case, window)

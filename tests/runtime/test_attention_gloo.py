"""The same attention over real processes and sockets, with ranks that dawdle and group calls cut small."""

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from megatron_fcp.plan import Plan
from megatron_fcp.runtime import Communicator, rounds
from megatron_fcp.runtime.transport import Message, Pending
from megatron_fcp.testing.attention_check import (
    RankResult,
    gather,
    largest_errors,
    random_inputs,
    random_model,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.gloo_pool import GlooPool
from megatron_fcp.testing.streams import Case, random_case

pytestmark = pytest.mark.runtime

TOLERANCE = 1e-12
CASES = 14


class Dawdling:
    """A transport whose rank sleeps now and then before it posts a round."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self._comm, self._random = comm, random.Random(seed)
        self.rank, self.size, self.position, self.in_order = comm.rank, comm.size, comm.position, comm.in_order

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if self._random.random() < 0.3:
            time.sleep(self._random.uniform(0, 0.004))
        return self._comm.post(sends, recvs)


def plan_of(cp_size: int, seed: int) -> tuple[Case, Plan]:
    """A stream at exactly this size; every third one with forwarded blocks."""
    rng = np.random.default_rng([21, cp_size, seed])
    case = random_case(rng, max_cp_size=8)
    while case.cp_size != cp_size:
        case = random_case(rng, max_cp_size=8)
    plan = case.plan()
    return case, reroute(plan, rng) if seed % 3 == 0 else plan


def run_cases(comm: Communicator) -> list[RankResult]:
    rounds.MAX_OPS_PER_PEER = 3
    comm.warm_up()
    results = []
    for seed in range(CASES):
        _, plan = plan_of(comm.size, seed)
        comm.agree(plan.digest)
        model = random_model(np.random.default_rng([22, seed]))
        transport = Dawdling(comm, comm.rank) if seed % 2 else comm
        results.append(run_rank(transport, plan, model, random_inputs(plan, model, seed)))
    return results


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_random_streams_over_gloo(gloo: GlooPool, cp_size: int) -> None:
    by_rank = gloo.run(cp_size, run_cases)
    for seed in range(CASES):
        case, plan = plan_of(cp_size, seed)
        model = random_model(np.random.default_rng([22, seed]))
        want = right_answer(plan, model, random_inputs(plan, model, seed))
        for name, error in largest_errors(plan, gather([r[seed] for r in by_rank], want), want).items():
            assert error < TOLERANCE, (name, error, seed, case, model)

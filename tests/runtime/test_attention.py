"""Out and gradients equal dense fp64 attention for random streams, in one process with ranks as threads."""

import numpy as np
import pytest

from megatron_fcp.plan import Plan
from megatron_fcp.testing.attention_check import (
    Model,
    gather,
    largest_errors,
    random_inputs,
    random_model,
    right_answer,
    run_rank,
)
from megatron_fcp.testing.forwarding import reroute, with_random_stages
from megatron_fcp.testing.streams import random_case
from megatron_fcp.testing.threads import Mode, run_ranks

pytestmark = pytest.mark.runtime

TOLERANCE = 1e-12
CASES, CHUNKS = 300, 6
REROUTED, REROUTED_CHUNKS = 120, 3


def check(plan: Plan, model: Model, seed: int, mode: Mode) -> None:
    x = random_inputs(plan, model, seed)
    want = right_answer(plan, model, x)
    skip = seed % 2 == 0
    results = run_ranks(plan.cp_size, lambda comm: run_rank(comm, plan, model, x, skip_padding=skip), mode=mode)
    for name, error in largest_errors(plan, gather(results, want), want).items():
        assert error < TOLERANCE, (name, error)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_streams(chunk: int) -> None:
    for seed in range(CASES * chunk // CHUNKS, CASES * (chunk + 1) // CHUNKS):
        rng = np.random.default_rng([11, seed])
        case = random_case(rng, max_cp_size=8)
        model = random_model(rng)
        try:
            check(case.plan(), model, seed, "rendezvous" if seed % 2 else "eager")
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}, {model}")
            raise


@pytest.mark.parametrize("chunk", range(REROUTED_CHUNKS))
def test_forwarded_blocks_and_uneven_stages(chunk: int) -> None:
    forwarded = 0
    for seed in range(REROUTED * chunk // REROUTED_CHUNKS, REROUTED * (chunk + 1) // REROUTED_CHUNKS):
        rng = np.random.default_rng([12, seed])
        case = random_case(rng, max_cp_size=8)
        plan = (with_random_stages if seed % 4 == 0 else reroute)(case.plan(), rng)
        messages = plan.schedule.messages
        owner = plan.placement.block_rank[messages.block]
        forwarded += int((owner != np.repeat(messages.src, np.diff(messages.ptr))).sum())
        model = random_model(rng)
        try:
            check(plan, model, seed, "rendezvous")
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}, {model}")
            raise
    assert forwarded > 50, "too few forwarded blocks to mean anything"

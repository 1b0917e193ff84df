"""Out and gradients equal dense fp64 attention for random streams, in one process with ranks as threads."""

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_fcp.testing.attention_check import check_in_threads, random_model
from megatron_fcp.testing.forwarding import reroute, with_random_stages
from megatron_fcp.testing.strategies import cases
from megatron_fcp.testing.streams import Case, random_case
from megatron_fcp.testing.threads import Mode

pytestmark = pytest.mark.runtime

CASES, CHUNKS = 300, 6
REROUTED, REROUTED_CHUNKS = 120, 3


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_streams(chunk: int) -> None:
    for seed in range(CASES * chunk // CHUNKS, CASES * (chunk + 1) // CHUNKS):
        rng = np.random.default_rng([11, seed])
        case = random_case(rng, max_cp_size=8)
        model = random_model(rng)
        try:
            mode: Mode = "rendezvous" if seed % 2 else "eager"
            check_in_threads(case.plan(), model, seed=seed, mode=mode, skip_padding=seed % 3 > 0)
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
            check_in_threads(plan, model, seed=seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}, {model}")
            raise
    assert forwarded > 50, "too few forwarded blocks to mean anything"


@given(cases(max_cp_size=4))
@settings(max_examples=60, deadline=None)
def test_small_streams(case: Case) -> None:
    check_in_threads(case.plan(), mode="rendezvous")

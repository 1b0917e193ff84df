"""What a plan's steps compute and hold; and that the oracle notices when they are wrong."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, RankPlan, make_plan
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.program import Compute, Exchange, Reduce, Release, Segment, Step, Transfer
from megatron_fcp.testing.audit import audit
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.oracle import TOLERANCE, largest_error
from megatron_fcp.testing.strategies import cases
from megatron_fcp.testing.streams import Case, random_case
from megatron_fcp.testing.transport import Deadlock

pytestmark = pytest.mark.plan


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases(), st.sampled_from([1, 2, None]))
def test_planned_streams_give_dense_attention(case: Case, window: int | None) -> None:
    plan = case.plan()
    assert audit(case, plan) == plan.schedule.num_rounds
    assert largest_error(plan, np.random.default_rng(0), window=window) < TOLERANCE


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 2**32 - 1), st.sampled_from([1, 2, None]))
def test_rerouted_streams_give_dense_attention(case: Case, seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    plan = reroute(case.plan(), rng, share=0.8, bystanders=0.3)
    audit(case, plan)
    assert largest_error(plan, rng, window=window) < TOLERANCE


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(
    ("lengths", "starts", "cp_size", "tokens_per_rank", "block_size"),
    [
        ([7], None, 2, 4, 1),  # not divisible by the ranks
        ([698], None, 4, 175, 7),
        ([1], None, 8, 4, 4),  # more ranks than blocks with documents
        ([1, 2], None, 4, 2, 1),
        ([5, 4, 0, 0], None, 3, 4, 2),  # cu_seqlens [0, 5, 9, 9, 9]
        ([0, 1, 0, 1], None, 2, 4, 2),
        ([4, 4, 2], None, 3, 4, 4),  # a document of 10 in blocks of 4: only the diagonal pair is causal
        ([10], None, 3, 4, 4),
        ([], None, 4, 8, 4),  # padding only
        ([1] * 32, None, 4, 8, 4),
        ([29, 1, 1, 1], None, 4, 8, 4),  # a giant and crumbs
        ([5, 6, 3], [1, 9, 20], 3, 8, 4),  # padding before, between and behind
        ([32], None, 1, 32, 8),
        ([64], None, 64, 1, 1),  # one token per rank
    ],
)
def test_streams_that_broke_others(
    mask: str, lengths: list[int], starts: list[int] | None, cp_size: int, tokens_per_rank: int, block_size: int
) -> None:
    config = FcpConfig(block_size=block_size, mask="full" if mask == "full" else "causal")
    plan = make_plan(lengths, starts=starts, cp_size=cp_size, tokens_per_rank=tokens_per_rank, config=config)
    for window in (1, None):
        assert largest_error(plan, np.random.default_rng(0), window=window) < TOLERANCE


def test_work_lists_cover_each_pair_once_and_hold_no_empty_entry() -> None:
    for seed in range(300):
        plan = random_case(np.random.default_rng(seed)).plan()
        stages = [stage for rank in range(plan.cp_size) for stage in plan.rank_plan(rank).stages]
        assert all((s.q_start < s.q_stop).all() and (s.kv_start < s.kv_stop).all() for s in stages)
        assert sum(stage.pairs for stage in stages) == plan.table.block_cost.sum()


def test_at_most_two_stages_of_kv_are_held() -> None:
    stages_seen = 0
    for seed in range(400):
        plan = random_case(np.random.default_rng(seed), max_blocks_per_rank=8).plan()
        for rank in range(plan.cp_size):
            rank_plan = plan.rank_plan(rank)
            tokens = [stage.kv_tokens for stage in rank_plan.stages[1:] if stage.kv_tokens]
            bound = max((sum(tokens[i : i + 2]) for i in range(len(tokens))), default=0)
            assert rank_plan.peak_forward.kv_tokens <= bound
            assert rank_plan.peak_backward.kv_tokens <= bound
            assert rank_plan.peak_forward.dkv_tokens == 0
            stages_seen = max(stages_seen, len(tokens))
    assert stages_seen > 4


def test_partial_gradients_are_held_for_two_stages_and_two_arrivals() -> None:
    for seed in range(400):
        plan = random_case(np.random.default_rng(seed), max_blocks_per_rank=8).plan()
        for rank in range(plan.cp_size):
            rank_plan = plan.rank_plan(rank)
            tokens = [stage.kv_tokens for stage in rank_plan.stages[1:] if stage.kv_tokens]
            bound = max((sum(tokens[i : i + 2]) for i in range(len(tokens))), default=0)
            pushes = [s for s in rank_plan.backward if isinstance(s, Exchange) and s.kind == "push"]
            arrivals = sorted(sum(t.tokens for t in push.recvs) for push in pushes)[-2:]
            assert rank_plan.peak_backward.dkv_tokens <= bound + sum(arrivals)


def test_the_next_stage_travels_while_a_stage_computes() -> None:
    """Pulls of stage s + 1 are posted before stage s is attended to, pushes of stage s after them."""
    checked = 0
    for seed in range(200):
        plan = random_case(np.random.default_rng(seed), max_blocks_per_rank=8).plan()
        for rank in range(plan.cp_size):
            for steps in (plan.rank_plan(rank).forward, plan.rank_plan(rank).backward):
                computed = {step.stage: i for i, step in enumerate(steps) if isinstance(step, Compute)}
                pulled: dict[int, int] = {}
                pushed: dict[int, int] = {}
                for i, step in enumerate(steps):
                    if isinstance(step, Exchange) and step.kind == "pull":
                        pulled.update({s.buffer: i for t in step.recvs for s in t.segments})
                    elif isinstance(step, Exchange):
                        pushed.update(
                            {s.buffer: min(i, pushed.get(s.buffer, i)) for t in step.sends for s in t.segments}
                        )
                for stage, last in pulled.items():
                    assert last < computed.get(stage - 1, len(steps))
                    assert last < pushed.get(stage - 1, len(steps))
                    checked += stage > 1
    assert checked > 500


# -- the oracle notices -----------------------------------------------------------------------------------------------

GOOD = make_plan([40, 3, 21], cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=4, rounds_per_stage=1))
FORWARDING = reroute(GOOD, np.random.default_rng(5), share=1.0)
Change = Callable[[list[Step]], list[Step]]


def judge(plan: Plan, rank: int, direction: str, change: Change, window: int | None = 1) -> None:
    """Execute ``plan`` with the steps of one rank changed."""
    rank_plans = [plan.rank_plan(r) for r in range(plan.cp_size)]
    before = getattr(rank_plans[rank], direction)
    after = tuple(change(list(before)))
    assert after != before, "the change must change something"
    changes = {direction: after}
    rank_plans[rank] = dataclasses.replace(rank_plans[rank], **changes)  # type: ignore[arg-type]
    error = largest_error(plan, np.random.default_rng(0), window=window, rank_plans=rank_plans)
    assert error < TOLERANCE, f"wrong by {error}"


def first(steps: list[Step], kind: type[Step], where: Callable[[Step], bool] = lambda _: True) -> int:
    return next(i for i, step in enumerate(steps) if isinstance(step, kind) and where(step))


def without(kind: type[Step], where: Callable[[Step], bool] = lambda _: True) -> Change:
    def change(steps: list[Step]) -> list[Step]:
        at = first(steps, kind, where)
        return [*steps[:at], *steps[at + 1 :]]

    return change


def moved(kind: type[Step], to: int, where: Callable[[Step], bool] = lambda _: True) -> Change:
    def change(steps: list[Step]) -> list[Step]:
        step = steps.pop(first(steps, kind, where))
        steps.insert(to if to >= 0 else len(steps), step)
        return steps

    return change


def is_remote(step: Step) -> bool:
    return isinstance(step, Compute) and step.stage == 2


def swap_first_two_exchanges(steps: list[Step]) -> list[Step]:
    i = first(steps, Exchange)
    j = i + 1 + first(steps[i + 1 :], Exchange)
    steps[i], steps[j] = steps[j], steps[i]
    return steps


def shorten_first_receive(steps: list[Step]) -> list[Step]:
    i = first(steps, Exchange, lambda s: isinstance(s, Exchange) and bool(s.recvs))
    exchange = steps[i]
    assert isinstance(exchange, Exchange)
    transfer = exchange.recvs[0]
    *rest, last = transfer.segments
    short = Transfer(transfer.peer, (*rest, Segment(last.buffer, last.start, last.stop - 1)))
    steps[i] = dataclasses.replace(exchange, recvs=(short, *exchange.recvs[1:]))
    return steps


def release_kv_before_use(steps: list[Step]) -> list[Step]:
    release = Release("kv", 2)
    steps.remove(release)
    steps.insert(first(steps, Compute, is_remote), release)
    return steps


def test_unchanged_steps_pass() -> None:
    for plan in (GOOD, FORWARDING):
        assert largest_error(plan, np.random.default_rng(0)) < TOLERANCE


@pytest.mark.parametrize("window", [1, None])
@pytest.mark.parametrize(
    ("direction", "change", "error", "message"),
    [
        ("forward", without(Compute, is_remote), AssertionError, "were left out"),
        ("forward", without(Exchange), Deadlock, "no rank can go on"),
        ("forward", shorten_first_receive, AssertionError, "sends segments of"),
        ("forward", release_kv_before_use, AssertionError, "used after its release"),
        ("forward", without(Release), AssertionError, "buffers were kept"),
        ("forward", moved(Compute, 0, is_remote), AssertionError, "arrives after its stage was computed"),
        ("backward", without(Reduce), AssertionError, "buffers were kept"),
        ("backward", moved(Exchange, -1), Deadlock, "no rank can go on"),
    ],
)
def test_wrong_steps_do_not_pass(
    direction: str, change: Change, error: type[Exception], message: str, window: int | None
) -> None:
    with pytest.raises(error, match=message):
        judge(GOOD, 0, direction, change, window)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ranks_that_disagree_on_the_order_of_rounds_deadlock(direction: str) -> None:
    config = FcpConfig(block_size=2, blocks_per_message=1)
    plan = make_plan([16], cp_size=2, tokens_per_rank=8, config=config)
    with pytest.raises(Deadlock, match="no rank can go on"):
        judge(plan, 0, direction, swap_first_two_exchanges)


def test_a_promise_of_less_memory_does_not_pass() -> None:
    rank_plans = [GOOD.rank_plan(r) for r in range(GOOD.cp_size)]
    peak = rank_plans[1].peak_backward
    vars(rank_plans[1])["peak_backward"] = dataclasses.replace(peak, dkv_tokens=peak.dkv_tokens - 1)
    with pytest.raises(AssertionError, match=r"rank 1 held .* promised"):
        largest_error(GOOD, np.random.default_rng(0), rank_plans=rank_plans)


def reduce_last(steps: list[Step]) -> list[Step]:
    """All partials summed at the end: too late for those that a forwarder had to pass on."""
    late = (Reduce, Release)
    reduces = [s for s in steps if isinstance(s, Reduce)]
    return [*(s for s in steps if not isinstance(s, late)), *reduces, *(s for s in steps if isinstance(s, Release))]


def passes_partials_on(plan: RankPlan) -> bool:
    pushes = [step for step in plan.backward if isinstance(step, Exchange) and step.kind == "push"]
    return any(segment.buffer for push in pushes for transfer in push.recvs for segment in transfer.segments)


def test_a_forwarder_must_sum_before_it_passes_on() -> None:
    rank_plans = [FORWARDING.rank_plan(r) for r in range(FORWARDING.cp_size)]
    forwarder = next(p for p in rank_plans if passes_partials_on(p))
    rank_plans[forwarder.rank] = dataclasses.replace(forwarder, backward=tuple(reduce_last(list(forwarder.backward))))
    assert largest_error(FORWARDING, np.random.default_rng(0), rank_plans=rank_plans) > 1e-3


def test_attending_to_padding_shows() -> None:
    plan = make_plan([5, 6], cp_size=2, tokens_per_rank=8, config=FcpConfig(block_size=4), starts=[0, 8])
    rank_plan = next(p for p in map(plan.rank_plan, range(2)) if (p.document_ids < 0).any())
    padding = int(np.flatnonzero(rank_plan.document_ids < 0)[0])
    local = rank_plan.stages[0]
    item = int(np.flatnonzero(local.q_stop == padding)[0])
    stop = local.q_stop.copy()
    stop[item] += 1
    wrong = dataclasses.replace(local, q_stop=frozen(stop), kv_stop=frozen(stop))
    rank_plans = [plan.rank_plan(r) for r in range(2)]
    rank_plans[rank_plan.rank] = dataclasses.replace(rank_plan, calls=((wrong,), *rank_plan.calls[1:]))
    with pytest.raises(AssertionError, match="padding"):
        largest_error(plan, np.random.default_rng(0), rank_plans=rank_plans)

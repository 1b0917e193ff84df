"""The compiled pricing of a plan against the same rules written out with dictionaries."""

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.simulate.hardware import load_hardware
from megatron_fcp.simulate.price import price_plan
from megatron_fcp.simulate.workloads import draw_lengths
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.plan


def work(pairs: int, queries: int, keys: int, cost: CostModel) -> float:
    return pairs * cost.pair_s * (queries + cost.q_half) / queries * (keys + cost.kv_half) / keys


def token_document(plan: Plan) -> list[int]:
    return plan.table.token_documents().tolist()


def stage_seconds(plan: Plan, rank: int, stage: int, arrived: set[int], cost: CostModel) -> float:
    """Token by token: what a rank's queries attend to in a stage."""
    b, document = plan.table.block_size, token_document(plan)
    local = [t for block in plan.placement.blocks_of(rank).tolist() for t in range(block * b, (block + 1) * b)]
    total = 0.0
    for d in sorted({document[t] for t in local} - {-1}):
        queries = [t for t in local if document[t] == d]
        if stage == 0:
            n = len(queries)
            total += work(n * (n + 1) // 2, n, n, cost)
            continue
        keys = [t for block in arrived for t in range(block * b, (block + 1) * b) if document[t] == d]
        keys = [t for t in keys if t < queries[-1]]
        seeing = [t for t in queries if keys and t > min(keys)]
        pairs = sum(k < q for q in queries for k in keys)
        if pairs:
            total += work(pairs, len(seeing), len(keys), cost)
    return total


def makespan(plan: Plan, cost: CostModel, barriers: bool) -> float:
    m, g = plan.schedule.messages, plan.ranks_per_node
    free: dict[tuple[str, int, int], float] = {}
    held: dict[tuple[int, int], float] = {}
    through: dict[tuple[int, int], float] = {}
    arrivals: dict[int, list[tuple[int, int, float]]] = {r: [] for r in range(plan.cp_size)}
    for i, round_ in enumerate(plan.schedule.message_round.tolist()):
        s, d = int(m.src[i]), int(m.dst[i])
        blocks = m.block[m.ptr[i] : m.ptr[i + 1]].tolist()
        tier = int(s // g != d // g)
        start = max(free.get(("send", tier, s), 0.0), free.get(("receive", tier, d), 0.0))
        start = max([start, *(held.get((s, block), 0.0) for block in blocks)])
        if barriers:
            start = max([start, *(end for (r, k), end in through.items() if r in (s, d) and k < round_)])
        end = start + cost.latency_s + len(blocks) * plan.table.block_size * cost.token_s(tier)
        free["send", tier, s] = free["receive", tier, d] = end
        for r in (s, d):
            through[r, round_] = max(through.get((r, round_), 0.0), end)
        for block in blocks:
            held[d, block] = end
            arrivals[d].append((round_, block, end))
    latest = 0.0
    for rank in range(plan.cp_size):
        now = stage_seconds(plan, rank, 0, set(), cost)
        before = -1
        for stage, stop in enumerate(plan.schedule.stage_ends[rank].tolist(), 1):
            mine = [(block, end) for round_, block, end in arrivals[rank] if before < round_ <= stop]
            now = max([now, *(end for _, end in mine)])
            now += stage_seconds(plan, rank, stage, {block for block, _ in mine}, cost)
            before = stop
        latest = max(latest, now)
    return latest


@pytest.mark.parametrize("barriers", [False, True])
def test_prices_follow_the_rules_token_by_token(barriers: bool) -> None:
    for seed in range(150):
        rng = np.random.default_rng([7, seed])
        case = random_case(rng)
        if case.config.mask == "full":
            continue
        g = case.config.ranks_per_node
        cost = CostModel(1e-6, 5.0, 3.0, 1024, 10.0 ** rng.integers(6, 10), 10.0 ** rng.integers(7, 11), 1e-6, g)
        hardware = cost if seed % 2 else None
        plan = make_plan(
            case.lengths, starts=case.starts, cp_size=case.cp_size, tokens_per_rank=case.tokens_per_rank,
            config=case.config, hardware=hardware,
        )  # fmt: skip
        got = price_plan(plan, cost, round_barriers=barriers)
        assert got.makespan == pytest.approx(makespan(plan, cost, barriers), rel=1e-12), (seed, case)


def test_a_full_mask_is_refused() -> None:
    plan = make_plan([64], cp_size=2, tokens_per_rank=32, config=FcpConfig(mask="full", block_size=16))
    with pytest.raises(ValueError, match="only causal plans"):
        price_plan(plan, load_hardware("h100-ib").cost())


@pytest.mark.parametrize("hardware", ["h100-ib", "flat5920"])
@pytest.mark.parametrize("workload", ["longtail", "weaktail", "bimodal", "magi", "wlbllm", "prolong"])
def test_plans_at_256_ranks_keep_kernels_busy(workload: str, hardware: str) -> None:
    cost = load_hardware(hardware).cost()
    for seed in (11, 12):  # not the seeds that the planner was tuned on
        lengths = draw_lengths(workload, num_tokens=256 * 32768, seed=seed)
        plan = make_plan(lengths, cp_size=256, tokens_per_rank=32768, hardware=cost)
        price = price_plan(plan, cost)
        assert price.efficiency > {"h100-ib": 0.93, "flat5920": 0.90}[hardware], (seed, price.efficiency)
        assert price_plan(plan, cost, round_barriers=True).efficiency > 0.85
        assert price.imbalance < 1.03


def test_textbook_plans_are_as_slow_as_the_network_makes_them() -> None:
    cost = load_hardware("h100-ib").cost()
    lengths = draw_lengths("longtail", num_tokens=256 * 32768, seed=0)
    textbook = make_plan(
        lengths, cp_size=256, tokens_per_rank=32768, config=FcpConfig(block_size=1024, ranks_per_node=8)
    )
    ours = make_plan(lengths, cp_size=256, tokens_per_rank=32768, hardware=cost)
    assert price_plan(ours, cost).efficiency > 2.5 * price_plan(textbook, cost).efficiency

"""The rules of a plan from their definitions, sharing no code with the planner or its own validation."""

from __future__ import annotations

from collections import Counter

from megatron_fcp.plan import Plan
from megatron_fcp.testing.streams import Case


def audit(case: Case, plan: Plan) -> int:
    """Replay the rounds of ``plan`` with plain sets, and check it against what ``case`` asked for.

    Every rank owns the same number of blocks; in a round a rank sends at most once and receives at most once per tier,
    and only what it holds; in the end it holds every block that its queries attend to.

    Returns
    -------
    int
        The maximum degree: most messages that one rank sends, or receives, in one tier over the whole plan. No
        schedule of the same messages can have fewer rounds.

    Raises
    ------
    AssertionError
        Naming the rank, round and block that break a rule.
    """
    owner = plan.placement.block_rank.tolist()
    assert Counter(owner) == dict.fromkeys(range(case.cp_size), len(owner) // case.cp_size), owner
    holds = [{b for b, rank in enumerate(owner) if rank == r} for r in range(case.cp_size)]
    degree: Counter[tuple[str, int, bool]] = Counter()
    for round_, messages in enumerate(rounds_of(plan)):
        busy: Counter[tuple[str, int, bool]] = Counter()
        for src, dst, blocks in messages:
            between = src // plan.ranks_per_node != dst // plan.ranks_per_node
            busy.update([("send", src, between), ("receive", dst, between)])
            for block in blocks:
                assert block in holds[src], f"round {round_}: rank {src} sends block {block}, which it does not hold"
                assert block not in holds[dst], f"round {round_}: rank {dst} receives block {block} again"
        assert not busy or max(busy.values()) == 1, f"round {round_}: {busy.most_common(1)}"
        for _, dst, blocks in messages:
            holds[dst].update(blocks)
        degree.update(busy)
    for rank, blocks in enumerate(needed(case, owner)):
        assert blocks <= holds[rank], f"rank {rank} attends to {blocks - holds[rank]} and never holds them"
    return max(degree.values(), default=0)


def rounds_of(plan: Plan) -> list[list[tuple[int, int, list[int]]]]:
    """(src, dst, blocks) of the messages of each round."""
    rounds: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(plan.schedule.num_rounds)]
    m = plan.schedule.messages
    ptr, block = m.ptr.tolist(), m.block.tolist()
    for i, (round_, src, dst) in enumerate(zip(plan.schedule.message_round.tolist(), m.src.tolist(), m.dst.tolist())):
        rounds[round_].append((src, dst, block[ptr[i] : ptr[i + 1]]))
    return rounds


def needed(case: Case, owner: list[int]) -> list[set[int]]:
    """Blocks that the queries of each rank attend to, its own included."""
    size = case.tokens_per_rank * case.cp_size // len(owner)
    wanted: list[set[int]] = [set() for _ in range(case.cp_size)]
    stop = 0
    for document, length in enumerate(case.lengths):
        start = case.starts[document] if case.starts is not None else stop
        stop = start + length
        if length:
            first, last = start // size, (stop - 1) // size
            for block in range(first, last + 1):
                until = block if case.config.mask == "causal" else last
                since = first
                if case.window is not None:  # of the block's first query of the document
                    since = max(max(start, block * size) - case.window, start) // size
                wanted[owner[block]].update(range(since, until + 1))
    return wanted

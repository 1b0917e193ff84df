"""Every rule of a plan, broken once."""

import dataclasses
from collections.abc import Sequence

import pytest

from megatron_fcp.plan import CommSchedule, Placement, Plan, build_block_table
from megatron_fcp.plan.arrays import frozen
from megatron_fcp.plan.schedule import order_by_round
from megatron_fcp.plan.transfers import Messages

pytestmark = pytest.mark.plan

Round = Sequence[tuple[int, int, list[int]]]

# One document over four of six blocks, a short one in block 4; two blocks on each of three ranks.
TABLE = build_block_table([16, 3], num_tokens=24, block_size=4)
OWNERS = [0, 1, 2, 0, 1, 2]
# Rank 0 attends from block 3 to blocks 1 and 2, rank 1 from block 1 to block 0, rank 2 from block 2 to blocks 0 and 1.
ROUNDS: list[Round] = [[(0, 1, [0]), (1, 2, [1]), (2, 0, [2])], [(1, 0, [1]), (0, 2, [0])]]
ENDS = [[0, 1], [0], [1]]


def build(
    rounds: Sequence[Round] = ROUNDS,
    owners: Sequence[int] = OWNERS,
    ends: Sequence[Sequence[int]] = ENDS,
    ranks_per_node: int = 1,
    num_rounds: int | None = None,
) -> Plan:
    flat = [(r, *message) for r, messages in enumerate(rounds) for message in messages]
    ptr = [0]
    for *_, blocks in flat:
        ptr.append(ptr[-1] + len(blocks))
    messages = Messages(
        frozen([src for _, src, _, _ in flat]),
        frozen([dst for _, _, dst, _ in flat]),
        frozen(ptr),
        frozen([b for *_, blocks in flat for b in blocks]),
    )
    stage_ends = tuple(frozen(list(e)) for e in ends)
    schedule = order_by_round(messages, frozen([r for r, *_ in flat]), len(rounds), stage_ends)
    if num_rounds is not None:
        schedule = dataclasses.replace(schedule, num_rounds=num_rounds)
    return Plan(TABLE, Placement(3, frozen(list(owners))), schedule, ranks_per_node)


def test_the_plan_to_break_is_a_good_one() -> None:
    plan = build()
    assert plan.schedule.num_rounds == 2
    assert isinstance(plan.schedule, CommSchedule)


def test_forwarding_is_legal_from_the_next_round_on() -> None:
    build([ROUNDS[0], [(2, 0, [1]), (1, 2, [0])]])  # both blocks come from ranks that got them in round 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owners": [0, 1, 2, 0, 1]}, "places 5 blocks but the stream has 6"),
        ({"owners": [0, 1, 2, 0, 1, 3]}, r"block 5 is placed on rank 3, outside 0\.\.2"),
        ({"owners": [0, 1, 2, 0, 1, -1]}, r"block 5 is placed on rank -1"),
        ({"owners": [0, 1, 2, 0, 1, 1]}, "rank 1 owns 3 blocks; every rank must own 2"),
        ({"rounds": [*ROUNDS, [(3, 0, [1])]]}, r"names sender 3, outside 0\.\.2"),
        ({"rounds": [*ROUNDS, [(0, -1, [1])]]}, r"names receiver -1"),
        ({"rounds": [*ROUNDS, [(0, 1, [6])]]}, r"names block 6, outside 0\.\.5"),
        ({"num_rounds": 1}, r"names round 1, outside 0\.\.0"),
        ({"rounds": [*ROUNDS, [(0, 0, [0])]]}, "rank 0 sends a message to itself"),
        ({"rounds": [*ROUNDS, [(0, 1, [])]]}, "message from rank 0 to rank 1 carries no block"),
        ({"rounds": [*ROUNDS, [(1, 0, [4])]]}, "block 4 is sent, but holds nothing"),
        ({"rounds": [ROUNDS[0], [(1, 0, [1]), (0, 2, [3, 0])]]}, "lists block 0 after block 3"),
        ({"rounds": [*ROUNDS, [(0, 2, [0])]], "ends": [[2]] * 3}, "rank 2 receives block 0 more than once"),
        ({"rounds": [*ROUNDS, [(1, 0, [0])]], "ends": [[2]] * 3}, "rank 0 receives block 0, which it owns"),
        ({"rounds": [[*ROUNDS[0], *ROUNDS[1]]], "ends": [[0]] * 3}, "in round 0 rank 0 sends more than once"),
        ({"rounds": [[(0, 1, [0]), (2, 1, [2])], *ROUNDS]}, "in round 0 rank 1 receives more than once"),
        (
            {"rounds": [[(0, 1, [0]), (1, 2, [0])], [(1, 0, [1])]]},
            "in round 0 rank 1 sends block 0, which it does not hold",
        ),
        ({"rounds": [ROUNDS[0], [(1, 0, [1])]]}, "rank 2 needs block 0 and never receives it"),
        ({"ends": ENDS[:2]}, "stages for 2 ranks, not 3"),
        ({"ends": [[1, 0], [0], [1]]}, r"stages of rank 0 do not end at ascending rounds of 0\.\.1"),
        ({"ends": [[0, 1], [0], [2]]}, "stages of rank 2 do not end"),
        ({"ends": [[0, 1], [0], [0]]}, "rank 2 receives in round 1, after its last stage"),
        ({"ends": [[0, 1], [], [1]]}, "rank 1 receives in round 0, after its last stage"),
    ],
)
def test_a_broken_rule_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**change)  # type: ignore[arg-type]


def test_tiers_count_apart() -> None:
    # Ranks 0 and 1 share a node: rank 0 sends inside it and out of it in the same round.
    rounds = [[(0, 1, [0]), (0, 2, [0]), (2, 0, [2])], [(1, 0, [1]), (1, 2, [1])]]
    build(rounds, ranks_per_node=2)
    with pytest.raises(ValueError, match="in round 0 rank 0 sends more than once between nodes"):
        build(rounds)
    with pytest.raises(ValueError, match="in round 0 rank 0 sends more than once inside its node"):
        build(rounds, ranks_per_node=3)

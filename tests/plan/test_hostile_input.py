"""Absurd numbers and files are refused by name: they neither hang, nor fill the memory, nor end in a traceback."""

import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fcp.config import MAX_STREAM, FcpConfig
from megatron_fcp.plan import build_block_table, make_plan, place_blocks, planfile, with_window
from megatron_fcp.plan.planfile import plan_from_dict, plan_to_dict, read_plan, write_plan
from megatron_fcp.plan.program import Compute, Exchange, Release, Segment, Slot, Transfer, pass_steps
from megatron_fcp.simulate.hardware import load_hardware

pytestmark = pytest.mark.plan

HARDWARE = load_hardware("h100-ib").cost()


@contextmanager
def at_most_megabytes(limit: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit * 1e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint16])
def test_numpy_numbers_plan_as_pythons_do(integer: Any, tmp_path: Path) -> None:
    def plan(n: Any) -> Any:
        settings = {"block_size": n(4), "ranks_per_node": n(2), "blocks_per_message": n(3), "rounds_per_stage": n(1)}
        return make_plan(
            [40, 20], cp_size=n(4), tokens_per_rank=n(16), window=n(10), config=FcpConfig(**settings, head_groups=n(2))
        )

    write_plan(plan(integer), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").digest == plan(int).digest
    other = with_window(plan(int), integer(3))
    assert json.loads(json.dumps(plan_to_dict(other)))["window"] == 3


def test_numpy_numbers_do_not_overflow() -> None:
    with pytest.raises(ValueError, match=f"a stream of {2**32:,} tokens"):
        make_plan([5], cp_size=np.int32(2**16), tokens_per_rank=np.int32(2**16))  # type: ignore[arg-type]


@pytest.mark.parametrize("hardware", [None, HARDWARE], ids=["plain", "hardware"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tokens_per_rank": 2**28},
            f"tokens per rank {2**28} is a stream .*: {MAX_STREAM // 4:,} per rank on 4 ranks",
        ),
        ({"tokens_per_rank": 2**40}, f"tokens per rank {2**40} is past the limit"),
        ({"tokens_per_rank": 2**70}, f"tokens per rank {2**70} is past the limit"),
        ({"tokens_per_rank": None}, "tokens per rank must be an integer of at least 1, got None"),
        ({"tokens_per_rank": 64.0}, r"tokens per rank must be an integer of at least 1, got 64\.0"),
        ({"cp_size": 2**31}, ": 0 per rank"),
        ({"cp_size": 2**63}, f"--context-parallel-size {2**63} is past the limit"),
    ],
)
def test_absurd_sizes_are_refused_at_once(
    hardware: Any, window: int | None, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan([5], **{"cp_size": 4, "tokens_per_rank": 64, **sizes}, hardware=hardware, window=window)


@pytest.mark.parametrize(
    "name",
    ["block_size", "blocks_per_message", "rounds_per_stage", "kv_buffer_tokens", "ranks_per_node", "max_ctas",
     "head_groups"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**63, f"{2**63} is past the limit of {2**31}"),
        (0, "must be an integer of at least 1, got 0"),
        (True, "must be an integer of at least 1, got True"),
        ("4", "must be an integer of at least 1, got '4'"),
    ],
)
def test_every_count_of_the_settings_is_bounded(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"--fcp-{name.replace('_', '-')} {message}"):
        FcpConfig(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 0, -1, "600", None, True])
def test_time_outs_that_no_clock_can_hold(value: Any) -> None:
    with pytest.raises(ValueError, match="--fcp-timeout must be a positive number of seconds"):
        FcpConfig(timeout_s=value)


def test_small_blocks_take_no_table_of_all_pairs() -> None:
    """Two ranks of 8192 one-token blocks: 67 million pairs of blocks that could be swapped."""
    table = build_block_table([11_000, 3_000, 2_384], num_tokens=2 * 8192, block_size=1)
    with at_most_megabytes(20):
        load = place_blocks(table, 2).rank_cost(table)
    assert load.max() - load.min() <= 2


def test_many_stages_take_no_square_of_time() -> None:
    """What a rank derives grows with its stages; 5000 of one round each."""
    stages = 5000
    slots = [Slot(Exchange("pull", s, (), (Transfer(1, (Segment(s + 1, 0, 4),)),)), s + 1) for s in range(stages)]
    begin = time.process_time()
    attended = [max(s - 2, 0) for s in range(stages + 1)]
    steps = pass_steps(slots, [Compute(s) for s in range(stages + 1)], [4] * (stages + 1), attended)
    assert time.process_time() - begin < 3
    released = [step.buffer for step in steps if isinstance(step, Release)]
    assert released == [*range(1, stages + 1)]


def test_a_file_that_unpacks_to_more_than_a_plan_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planfile, "MAX_BYTES", 1 << 20)
    bomb = tmp_path / "plan.json.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b" " * (1 << 20))
    assert bomb.stat().st_size < 1 << 20
    with at_most_megabytes(8), pytest.raises(ValueError, match="longer than the 1048576 bytes that any plan takes"):
        read_plan(bomb)
    (tmp_path / "plan.json").write_bytes(b"[" * (1 << 21))
    with pytest.raises(ValueError, match="longer than the 1048576 bytes"):
        read_plan(tmp_path / "plan.json")
    monkeypatch.setattr(planfile, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100; raise --fcp-block-size"):
        write_plan(make_plan([10], cp_size=2, tokens_per_rank=8), tmp_path / "long.json")


def test_a_short_file_for_a_stream_that_no_rank_could_hold() -> None:
    """All its parts agree; what a rank derives from it would take 50 GB."""
    content = plan_to_dict(make_plan([1], cp_size=1, tokens_per_rank=8, config=FcpConfig(block_size=8)))
    assert plan_from_dict(content).cp_size == 1
    huge = {**content, "block_size": 2**31, "tokens_per_rank": 2**31}
    with pytest.raises(ValueError, match=f"at most {MAX_STREAM:,} can be planned together"):
        plan_from_dict(huge)


@pytest.mark.parametrize("hardware", [None, HARDWARE], ids=["plain", "hardware"])
@pytest.mark.parametrize(
    ("tokens_per_rank", "plain", "made_for_hardware"),
    [(4099, 4099, 4099), (8198, 4099, 4099), (4098, 2049, 683), (997, 997, 997), (3, 3, 3), (64, 64, 64)],
)
def test_tokens_per_rank_with_few_divisors(
    hardware: Any, tokens_per_rank: int, plain: int, made_for_hardware: int
) -> None:
    plan = make_plan([tokens_per_rank + 1], cp_size=2, tokens_per_rank=tokens_per_rank, hardware=hardware)
    assert plan.table.block_size == (made_for_hardware if hardware else plain)

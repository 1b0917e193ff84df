"""The plan file: exactly what was planned comes back, and nothing else gets in."""

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.plan.planfile import plan_from_dict, plan_to_dict, read_plan, write_plan
from megatron_fcp.testing.forwarding import reroute
from megatron_fcp.testing.streams import random_case

pytestmark = pytest.mark.plan

PLAN = make_plan([10, 3, 19], cp_size=4, tokens_per_rank=8, config=FcpConfig(block_size=4))


def content() -> dict[str, Any]:
    return json.loads(json.dumps(plan_to_dict(PLAN)))


def test_the_file_is_the_documented_object() -> None:
    got = content()
    assert list(got) == [
        "format",
        "cp_size",
        "block_size",
        "tokens_per_rank",
        "documents",
        "block_rank",
        "rounds",
        "stage_rounds",
        "ranks_per_node",
        "digest",
    ]
    assert got["format"] == "fcp-plan/1"
    assert (got["cp_size"], got["block_size"], got["tokens_per_rank"], got["ranks_per_node"]) == (4, 4, 8, 1)
    assert got["documents"] == [10, 3, 19]
    assert got["block_rank"] == PLAN.placement.block_rank.tolist()
    assert len(got["rounds"]) == PLAN.schedule.num_rounds
    sent = [(src, dst, block) for messages in got["rounds"] for src, dst, blocks in messages for block in blocks]
    assert len(sent) == PLAN.schedule.messages.block.size
    assert all(got["block_rank"][block] == src != dst for src, dst, block in sent)
    assert got["stage_rounds"] == [ends.tolist() for ends in PLAN.schedule.stage_ends]
    assert got["digest"] == PLAN.digest


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for seed in range(60):
        rng = np.random.default_rng(seed)
        plan = random_case(rng).plan()
        plan = reroute(plan, rng) if seed % 2 else plan
        write_plan(plan, path)
        back = read_plan(path)
        assert back.digest == plan.digest
        assert plan_to_dict(back) == plan_to_dict(plan)
        assert all(back.rank_plan(r).backward == plan.rank_plan(r).backward for r in range(plan.cp_size))
    assert os.listdir(tmp_path) == [name]


def test_masks_and_gaps_survive(tmp_path: Path) -> None:
    config = FcpConfig(block_size=4, mask="full")
    plan = make_plan([10, 3], starts=[2, 20], cp_size=4, tokens_per_rank=8, config=config)
    write_plan(plan, tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert (stored["mask"], stored["document_starts"]) == ("full", [2, 20])
    assert read_plan(tmp_path / "plan.json").digest == plan.digest


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_equal_plans_give_equal_bytes(tmp_path: Path, name: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_plan(PLAN, tmp_path / folder / name)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_gzip_by_name(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json.gz")
    write_plan(PLAN, tmp_path / "plan.json")
    assert gzip.decompress((tmp_path / "plan.json.gz").read_bytes()) == (tmp_path / "plan.json").read_bytes()


def test_writing_replaces_the_file_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_plan(PLAN, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]
    monkeypatch.undo()
    write_plan(PLAN, path)
    assert read_plan(path).digest == PLAN.digest


def test_writing_respects_links_pipes_and_the_umask(tmp_path: Path) -> None:
    (tmp_path / "real.json").touch()
    (tmp_path / "link.json").symlink_to("real.json")
    write_plan(PLAN, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert read_plan(tmp_path / "real.json").digest == PLAN.digest
    old = os.umask(0o027)
    try:
        write_plan(PLAN, tmp_path / "new.json")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640
    write_plan(PLAN, os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_every_truncation_is_noticed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_plan(PLAN, path)
    whole = path.read_bytes()
    for size in range(len(whole) - 2):  # the last two bytes are the closing brace and a line feed
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"plan file .*: truncated or no.*; write it again"):
            read_plan(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x1f\x8b\x08\x00", "not JSON text .*named .gz"),
        (b"[]", "top level"),
        (b"3", "top level"),
        (b'{"format": "fcp-plan/1", "format": "fcp-plan/1"}', "a key occurs twice"),
        (b"[" * 100_000, "truncated or not JSON"),
        (b'{"format": ' + b"9" * 5000 + b"}", "truncated or not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_plan(path)


def test_plain_text_named_gz(tmp_path: Path) -> None:
    path = tmp_path / "plan.json.gz"
    path.write_text(json.dumps(content()))
    with pytest.raises(ValueError, match="no gzip file"):
        read_plan(path)


def test_a_missing_file_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_plan(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "fcp-plan/3", "'fcp-plan/3', but this release reads 'fcp-plan/1' and 'fcp-plan/2'"),
        ("format", "fcp-plan/2", "the key 'window' is missing"),
        ("window", 5, "the key 'window' is unknown"),
        ("format", None, "format is None"),
        ("cp_size", 0, "cp_size must be a positive integer, not 0"),
        ("cp_size", True, "cp_size must be a positive integer, not True"),
        ("cp_size", 4.0, r"cp_size must be a positive integer, not 4\.0"),
        ("cp_size", 2, "block_rank has 8 entries for 4 blocks"),
        ("cp_size", 2**40, "cp_size must be"),
        ("block_size", 3, "block_size 3 does not divide tokens_per_rank 8"),
        ("tokens_per_rank", "8", "tokens_per_rank must be"),
        ("ranks_per_node", -1, "ranks_per_node must be"),
        ("ranks_per_node", 2, "changed after it was written"),
        ("documents", [10, 3, -19], r"-19 \(document 2\) is negative"),
        ("documents", [10, 3, 20], "33 tokens but the stream has only 32"),
        ("documents", [10, 3, 18], "changed after it was written"),
        ("documents", [13, 19], "never receives it"),
        ("documents", [10, 3, 19.0], r"documents\[2\] must be an integer"),
        ("documents", {"0": 1}, "documents must be a list"),
        ("documents", 5, "documents must be a list"),
        ("block_rank", [0] * 8, "rank 0 owns 8 blocks"),
        ("block_rank", [0, 1], "block_rank has 2 entries for 8 blocks"),
        ("block_rank", [None] * 8, r"block_rank\[0\] must be an integer"),
        ("rounds", [], "never receives it"),
        ("rounds", [3], r"rounds\[0\] must be a list"),
        ("rounds", [[[0, 1]]], r"rounds\[0\]\[0\] must be \[src, dst, \[block, ...\]\]"),
        ("rounds", [[[0, 1, 2]]], r"rounds\[0\]\[0\]\[2\] must be a list"),
        ("rounds", [[[0, "1", [2]]]], r"rounds\[0\]\[0\]\[1\] must be an integer"),
        ("rounds", [[[0, 9, [2]]]], r"names receiver 9, outside 0\.\.3"),
        ("rounds", [[[0, 1, [-1]]]], "names block -1"),
        ("stage_rounds", [[0]], "stages for 1 ranks, not 4"),
        ("stage_rounds", [0, 0, 0, 0], r"stage_rounds\[0\] must be a list"),
        ("stage_rounds", [[99]] * 4, "stages of rank 0 do not end"),
        ("digest", "0" * 64, "changed after it was written"),
        ("digest", None, "changed after it was written"),
        ("mask", "full", "never receives it"),
        ("mask", "sliding", "mask 'sliding' is unknown"),
        ("mask", ["full"], "mask .* is unknown"),
        ("document_starts", [0, 11, 14], "document 2 ends|33 tokens"),
        ("document_starts", [0], "3 document lengths but 1 document starts"),
        ("comment", "mine", "'comment' is unknown"),
    ],
)
def test_a_changed_value_is_named(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        plan_from_dict({**content(), key: value})
    assert "write it again with `megatron-fcp plan --out`" in str(caught.value)


@pytest.mark.parametrize("key", list(content()))
def test_a_missing_key_is_named(key: str) -> None:
    changed = content()
    del changed[key]
    with pytest.raises(ValueError, match="format is 'none'" if key == "format" else f"'{key}' is missing"):
        plan_from_dict(changed)


def test_any_single_changed_number_is_noticed() -> None:
    """Every integer anywhere in the file, one up and one down: refused, whatever rule or the digest it breaks."""
    tried = 0
    for holder, at in integers(whole := content()):
        for step in (-1, 1):
            holder[at] += step
            with pytest.raises(ValueError, match="write it again"):
                plan_from_dict(whole)
            holder[at] -= step
            tried += 1
    assert tried == 100
    assert plan_from_dict(whole).digest == PLAN.digest


def integers(node: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for at, value in node.items() if isinstance(node, dict) else enumerate(node):
        if type(value) is int:
            found.append((node, at))
        elif isinstance(value, dict | list):
            found += integers(value)
    return found

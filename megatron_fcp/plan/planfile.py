"""The plan files ``fcp-plan/1`` and ``fcp-plan/2``: JSON, gzipped where the name ends in ``.gz``.

::

    {"format": "fcp-plan/1", "cp_size": N, "block_size": B, "tokens_per_rank": T,
     "documents": [lengths in stream order],
     "block_rank": [rank of block i; block i is tokens iB .. (i+1)B of the stream],
     "rounds": [[[src, dst, [block, ...]], ...], ...],
     "stage_rounds": [[r0, r1, ...] per rank],     a compute stage starts after each of these rounds
     "ranks_per_node": G, "digest": "..."}

Four keys appear only where the plan needs them: ``"mask": "full"`` (default: causal), ``"document_starts"`` where the
stream holds padding between documents, ``"push_prices": [token, inside, message]`` where backward's pushes do not cost
what they do by default (:class:`megatron_fcp.plan.cost.PushPrices`), and, where ranks may not hold all that they
receive, ``"waves":
{"ends": [last round of each], "held_tokens": most}`` (:mod:`plan.waves`). Equal plans give equal bytes.

A plan for a window is an ``fcp-plan/2``: the same keys and ``"window": W``, tokens before a query that it attends to at
most. A rank needs only the blocks that hold such a token then, and only the last ``W`` tokens of a document in a block
travel: who reads it by the rules of version 1 would miss transfers and price work that nobody does.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, cast, get_args

import numpy as np

from megatron_fcp.config import MAX_NUMBER, Mask, check_stream
from megatron_fcp.files import write_whole
from megatron_fcp.plan.arrays import frozen, offsets
from megatron_fcp.plan.blocks import build_block_table
from megatron_fcp.plan.cost import PushPrices
from megatron_fcp.plan.placement import Placement
from megatron_fcp.plan.plan import Plan
from megatron_fcp.plan.schedule import CommSchedule, Waves, order_by_round
from megatron_fcp.plan.transfers import Messages

FORMAT = "fcp-plan/1"
WINDOWED = "fcp-plan/2"
MAX_BYTES = 2**28  # of text; 1024 ranks with 512K documents in blocks of 128 tokens take 2**24
_REMEDY = "write it again with `megatron-fcp plan --out`"
_REQUIRED = (
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
)
_OPTIONAL = ("mask", "document_starts", "push_prices", "waves")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """``plan`` as the object that its file holds."""
    table, schedule, messages = plan.table, plan.schedule, plan.schedule.messages
    rounds: list[list[list[Any]]] = [[] for _ in range(schedule.num_rounds)]
    ptr, block = messages.ptr.tolist(), messages.block.tolist()
    triples = zip(schedule.message_round.tolist(), messages.src.tolist(), messages.dst.tolist())
    for m, (round_, src, dst) in enumerate(triples):
        rounds[round_].append([src, dst, block[ptr[m] : ptr[m + 1]]])
    content: dict[str, Any] = {
        "format": FORMAT if table.window is None else WINDOWED,
        "cp_size": plan.cp_size,
        "block_size": table.block_size,
        "tokens_per_rank": plan.tokens_per_rank,
        "documents": table.document_length.tolist(),
        "block_rank": plan.placement.block_rank.tolist(),
        "rounds": rounds,
        "stage_rounds": [ends.tolist() for ends in schedule.stage_ends],
        "ranks_per_node": plan.ranks_per_node,
        "digest": plan.digest,
    }
    if table.mask != "causal":
        content["mask"] = table.mask
    if (table.document_start != offsets(table.document_length)[:-1]).any():
        content["document_starts"] = table.document_start.tolist()
    if plan.push_prices != PushPrices():
        content["push_prices"] = list(astuple(plan.push_prices))
    if schedule.waves is not None:
        content["waves"] = {"ends": schedule.waves.ends.tolist(), "held_tokens": schedule.waves.held_tokens}
    if table.window is not None:
        content["window"] = table.window
    return content


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path``, gzipped if it ends in ``.gz``.

    A reader never sees half a file: it is written beside its place and moved there.

    Raises
    ------
    OSError
        If the file cannot be written; nothing is left behind.
    ValueError
        If it would be longer than what :func:`read_plan` accepts.
    """
    data = (json.dumps(plan_to_dict(plan), separators=(",", ":")) + "\n").encode("ascii")
    if len(data) > MAX_BYTES:
        raise ValueError(f"the plan takes {len(data)} bytes, more than {MAX_BYTES}; raise --fcp-block-size")
    if os.fspath(path).endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # no time stamp: equal plans, equal bytes
    write_whole(path, data)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises
    ------
    ValueError
        If the file is truncated, of another version, changed after it was written, far too long (compressed or not),
        or not a plan at all; names the file, what is wrong with it and what to do.
    OSError
        If it cannot be opened.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return plan_from_dict(_parse(data, compressed=os.fspath(path).endswith(".gz")))
    except ValueError as error:
        raise ValueError(f"plan file {os.fspath(path)}: {error}") from error


def plan_from_dict(content: object) -> Plan:
    """The plan that ``content``, the object of a plan file, describes.

    Raises
    ------
    ValueError
        Naming the key that is missing, malformed or contradicts the rest, and the remedy.
    """
    if not isinstance(content, dict):
        raise ValueError(f"the top level of an {FORMAT} file is an object, here it is not; {_REMEDY}")
    fields = cast(dict[str, Any], content)
    found = fields.get("format", "none")
    if found not in (FORMAT, WINDOWED):
        raise ValueError(f"the format is {found!r:.40}, but this release reads {FORMAT!r} and {WINDOWED!r}; {_REMEDY}")
    required = _REQUIRED if found == FORMAT else (*_REQUIRED, "window")
    missing = [key for key in required if key not in fields]
    unknown = [key for key in fields if key not in required + _OPTIONAL]
    if missing or unknown:
        problem = f"the key {missing[0]!r} is missing" if missing else f"the key {unknown[0]!r:.40} is unknown"
        raise ValueError(f"{problem}; {_REMEDY}")
    try:
        plan = _build(fields)
    except ValueError as error:
        raise ValueError(f"{error}; {_REMEDY}") from error
    if plan.digest != fields["digest"]:
        raise ValueError(
            f"changed after it was written: it carries the digest {fields['digest']!r:.80}, but its content has "
            f"{plan.digest!r}; {_REMEDY}"
        )
    return plan


def _parse(data: bytes, compressed: bool) -> object:
    try:
        if compressed:  # a few bytes can stand for more than fits into memory
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"longer than the {MAX_BYTES} bytes that any plan takes")
        return json.loads(data.decode("ascii"), object_pairs_hook=_no_repeats)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"truncated or no gzip file ({error}); {_REMEDY}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON text (byte {error.start}; a gzipped file must be named .gz); {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"truncated or not JSON ({error}); {_REMEDY}") from error


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key occurs twice")
    return content


def _build(fields: dict[str, Any]) -> Plan:
    cp_size, block_size = _integer(fields, "cp_size"), _integer(fields, "block_size")
    tokens_per_rank, ranks_per_node = _integer(fields, "tokens_per_rank"), _integer(fields, "ranks_per_node")
    check_stream(cp_size, tokens_per_rank)
    if tokens_per_rank % block_size:
        raise ValueError(f"block_size {block_size} does not divide tokens_per_rank {tokens_per_rank}")
    owners = _integers(fields["block_rank"], "block_rank")
    if len(owners) * block_size != cp_size * tokens_per_rank:
        raise ValueError(f"block_rank has {len(owners)} entries for {cp_size * tokens_per_rank // block_size} blocks")
    mask: Mask = fields.get("mask", "causal")
    if mask not in get_args(Mask):
        raise ValueError(f"mask {mask!r} is unknown; it must be one of {', '.join(get_args(Mask))}")
    starts = fields.get("document_starts")
    table = build_block_table(
        _integers(fields["documents"], "documents"),
        num_tokens=cp_size * tokens_per_rank,
        block_size=block_size,
        mask=mask,
        starts=None if starts is None else _integers(starts, "document_starts"),
        window=_integers([fields["window"]], "window")[0] if "window" in fields else None,
    )
    stage_ends = [
        frozen(_integers(ends, f"stage_rounds[{rank}]"))
        for rank, ends in enumerate(_list(fields["stage_rounds"], "stage_rounds"))
    ]
    schedule = _schedule(_list(fields["rounds"], "rounds"), stage_ends)
    if "waves" in fields:
        schedule = replace(schedule, waves=_waves(fields["waves"]))
    return Plan(table, Placement(cp_size, frozen(owners)), schedule, ranks_per_node, _prices(fields))


def _prices(fields: dict[str, Any]) -> PushPrices:
    if "push_prices" not in fields:
        return PushPrices()
    prices = _integers(fields["push_prices"], "push_prices")
    if len(prices) != 3:
        raise ValueError(f"push_prices must be [token, inside, message], not {len(prices)} numbers")
    return PushPrices(*prices)


def _schedule(rounds: list[Any], stage_ends: Sequence[Any]) -> CommSchedule:
    round_: list[int] = []
    src: list[int] = []
    dst: list[int] = []
    blocks: list[list[int]] = []
    for r, messages in enumerate(rounds):
        for m, message in enumerate(_list(messages, f"rounds[{r}]")):
            where = f"rounds[{r}][{m}]"
            if len(_list(message, where)) != 3:
                raise ValueError(f"{where} must be [src, dst, [block, ...]]")
            ends = _integers(message[:2], where)
            round_.append(r)
            src.append(ends[0])
            dst.append(ends[1])
            blocks.append(_integers(message[2], f"{where}[2]"))
    ptr = offsets([len(carried) for carried in blocks])
    block = np.array([b for carried in blocks for b in carried], dtype=np.int64)
    messages = Messages(frozen(src), frozen(dst), frozen(ptr), frozen(block))
    return order_by_round(messages, frozen(round_), len(rounds), tuple(stage_ends))


def _waves(value: object) -> Waves:
    if not isinstance(value, dict) or set(cast(dict[str, Any], value)) != {"ends", "held_tokens"}:
        raise ValueError(f'waves must be {{"ends": [round, ...], "held_tokens": tokens}}, not {value!r:.40}')
    fields = cast(dict[str, Any], value)
    return Waves(frozen(_integers(fields["ends"], "waves.ends")), _integer(fields, "held_tokens"))


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, not {value!r:.40}")
    return cast(list[Any], value)


def _integers(value: object, where: str) -> list[int]:
    for i, item in enumerate(_list(value, where)):
        if type(item) is not int or not -MAX_NUMBER <= item <= MAX_NUMBER:
            raise ValueError(f"{where}[{i}] must be an integer, not {item!r:.40}")
    return cast(list[int], value)


def _integer(fields: dict[str, Any], key: str) -> int:
    value = fields[key]
    if type(value) is not int or not 1 <= value <= MAX_NUMBER:
        raise ValueError(f"{key} must be a positive integer, not {value!r:.40}")
    return value

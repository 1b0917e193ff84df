"""Arguments that several sub-commands take: the packed stream, its plan, and the shape of KV."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.plan import Plan, make_plan

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_TRAINING_FLAGS = (("--context-parallel-size", "--cp-size"), ("--fcp-", "--"))


def at_least(lowest: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least ``lowest``."""

    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text.strip()) or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {lowest}, got {text!r:.40}")
        return int(text)

    return parse


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`plan_of` reads."""
    stream = parser.add_argument_group("packed stream")
    stream.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help="document lengths in stream order: one integer per line, or a JSON list; '-' reads standard input",
    )
    stream.add_argument("--cp-size", required=True, type=at_least(1), metavar="N", help="context-parallel ranks")
    stream.add_argument("--tokens-per-rank", required=True, type=at_least(1), metavar="T")
    stream.add_argument("--mask", choices=get_args(Mask), default="causal", help="attention inside a document")
    planner = parser.add_argument_group("planner")
    defaults = FcpConfig()
    planner.add_argument(
        "--block-size",
        type=at_least(1),
        metavar="B",
        help="tokens per block, a divisor of T (default: the largest up to 4096)",
    )
    planner.add_argument(
        "--ranks-per-node",
        type=at_least(1),
        default=defaults.ranks_per_node,
        metavar="G",
        help="ranks that share the fast network tier (default: %(default)s, one flat network)",
    )
    planner.add_argument(
        "--rounds-per-stage",
        type=at_least(1),
        metavar="R",
        help="communication rounds merged into one compute stage (default: the planner cuts)",
    )
    planner.add_argument(
        "--blocks-per-message",
        type=at_least(1),
        default=defaults.blocks_per_message,
        metavar="K",
        help="blocks that one message may carry (default: %(default)s)",
    )


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of KV on one rank: it turns tokens into bytes."""
    kv = parser.add_argument_group("KV of one rank, to turn tokens into bytes")
    kv.add_argument("--num-kv-heads", type=at_least(1), default=8, help="after tensor parallelism (default: 8)")
    kv.add_argument("--head-dim", type=at_least(1), default=128, help="default: 128")
    kv.add_argument("--dtype-bytes", type=at_least(1), default=2, help="bytes per element (default: 2, bf16)")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the arguments of :func:`add_stream_arguments` ask for.

    Raises
    ------
    ValueError
        Naming the flag as it is spelled here.
    """
    lengths = read_lengths(arguments.lengths)
    config = FcpConfig(
        block_size=arguments.block_size,
        mask=arguments.mask,
        ranks_per_node=arguments.ranks_per_node,
        rounds_per_stage=arguments.rounds_per_stage,
        blocks_per_message=arguments.blocks_per_message,
    )
    try:
        return make_plan(lengths, cp_size=arguments.cp_size, tokens_per_rank=arguments.tokens_per_rank, config=config)
    except ValueError as error:
        message = str(error)
        for training, here in _TRAINING_FLAGS:
            message = message.replace(training, here)
        raise ValueError(
            message if message.startswith("--") else f"--lengths {arguments.lengths}: {message}"
        ) from error


def read_lengths(source: str) -> list[int]:
    """Document lengths from a file, or from standard input for ``-``: one integer per line, or a JSON list.

    Raises
    ------
    ValueError
        Naming ``--lengths``, the file, and the line or position that is wrong.
    """
    where = f"--lengths {source}"
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is not text; give one integer per line, or a JSON list") from error
    if text.lstrip().startswith("["):
        return _lengths_from_json(text, where)
    lengths: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            lengths.append(_length(line.strip(), f"{where}, line {number}"))
    if not lengths:
        raise ValueError(f"{where}: is empty; give one integer per line, or a JSON list")
    return lengths


def _lengths_from_json(text: str, where: str) -> list[int]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not a whole JSON list: {error}") from error
    return [_length(json.dumps(item), f"{where}, entry {position}") for position, item in enumerate(items)]


def _length(text: str, where: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{where}: {text:.40} is not an integer; a length is a whole number of tokens")
    if int(text) < 0:
        raise ValueError(f"{where}: {text} is negative; a length is at least 0")
    return int(text)

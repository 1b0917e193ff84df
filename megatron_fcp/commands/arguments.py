"""Arguments that several sub-commands take: the packed stream, its plan, and the shape of KV."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.plan import Plan, make_plan
from megatron_fcp.plan.cost import CostModel
from megatron_fcp.plan.planfile import read_plan
from megatron_fcp.simulate.hardware import AttentionShape, load_hardware

LARGEST = 2**31
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_TRAINING_FLAGS = (("--context-parallel-size", "--cp-size"), ("--fcp-", "--"))
_STREAM = ("lengths", "cp_size", "tokens_per_rank")
_PLANNER = ("block_size", "mask", "ranks_per_node", "rounds_per_stage", "blocks_per_message", "kv_buffer_tokens")
_NOT_WITH_HARDWARE = ("rounds_per_stage", "blocks_per_message")


def at_least(lowest: int) -> Callable[[str], int]:
    """An argparse type: an integer from ``lowest`` to ``LARGEST``."""

    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text.strip()) or not lowest <= int(text) <= LARGEST:
            raise argparse.ArgumentTypeError(f"must be an integer from {lowest} to {LARGEST}, got {text!r:.40}")
        return int(text)

    return parse


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`plan_of` reads."""
    stream = parser.add_argument_group("packed stream")
    stream.add_argument(
        "--lengths",
        metavar="FILE",
        help="document lengths in stream order: one integer per line, or a JSON list; '-' reads standard input",
    )
    stream.add_argument("--cp-size", type=at_least(1), metavar="N", help="context-parallel ranks")
    stream.add_argument("--tokens-per-rank", type=at_least(1), metavar="T", help="the stream is padded to N * T tokens")
    stream.add_argument("--plan", metavar="FILE", help="take the plan from a file instead of planning")
    planner = parser.add_argument_group("planner")
    planner.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="plan for the smallest makespan on this cluster, a preset or a YAML file; the planner then chooses block "
        "size, messages, stages and ranks per node itself unless told (default: balance compute, owners send)",
    )
    planner.add_argument("--mask", choices=get_args(Mask), help="attention inside a document (default: causal)")
    planner.add_argument(
        "--window",
        type=at_least(0),
        metavar="W",
        help="tokens before a query that it attends to at most, as in --window-size W,0 (default: all of its document)",
    )
    planner.add_argument(
        "--block-size",
        type=at_least(1),
        metavar="B",
        help="tokens per block, a divisor of T (default: the largest up to 4096)",
    )
    planner.add_argument(
        "--ranks-per-node",
        type=at_least(1),
        metavar="G",
        help=f"ranks that share the fast network tier (default: {FcpConfig.ranks_per_node}, one flat network)",
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
        metavar="K",
        help=f"blocks that one message may carry (default: {FcpConfig.blocks_per_message})",
    )
    planner.add_argument(
        "--kv-buffer-tokens",
        type=at_least(1),
        metavar="K",
        help="KV tokens of other ranks that a rank may hold at once (default: 32 * T with --hardware)",
    )


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of KV on one rank: it turns tokens into bytes."""
    kv = parser.add_argument_group("attention of one rank, to turn tokens into bytes and time")
    kv.add_argument("--num-heads", type=at_least(1), default=64, help="query heads, with --hardware (default: 64)")
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
    given = {name for name in (*_STREAM, *_PLANNER, "hardware", "window") if getattr(arguments, name) is not None}
    if arguments.plan is not None:
        if given:
            raise ValueError(f"--plan brings its own stream and settings; leave out {_flags(sorted(given))}")
        return file_plan(arguments.plan)
    if missing := [name for name in _STREAM if name not in given]:
        raise ValueError(f"the following arguments are required: {_flags(missing)} (or --plan)")
    if arguments.window is not None and arguments.mask == "full":
        raise ValueError(f"--window {arguments.window} looks back from a query; leave out --mask full")
    lengths = read_lengths(arguments.lengths)
    with naming_flag("--lengths", arguments.lengths), own_flags():
        return make_plan(
            lengths,
            cp_size=arguments.cp_size,
            tokens_per_rank=arguments.tokens_per_rank,
            config=FcpConfig(**{name: getattr(arguments, name) for name in _PLANNER if name in given}),
            hardware=_cost_of(arguments, given),
            window=arguments.window,
        )


def _cost_of(arguments: argparse.Namespace, given: set[str]) -> CostModel | None:
    """Prices of the cluster that ``--hardware`` names, with the KV and heads of one rank."""
    if arguments.hardware is None:
        return None
    if clash := [name for name in _NOT_WITH_HARDWARE if name in given]:
        raise ValueError(f"--hardware makes the planner choose messages and stages; leave out {_flags(clash)}")
    if arguments.mask == "full":
        raise ValueError("--mask full has no makespan planner yet; leave out --hardware, or use --mask causal")
    check_heads(arguments.num_heads, arguments.num_kv_heads)
    shape = AttentionShape(
        arguments.num_heads, arguments.num_kv_heads, arguments.head_dim, bytes_per_element=arguments.dtype_bytes
    )
    cost = load_hardware(arguments.hardware).cost(shape)
    return cost if arguments.ranks_per_node is None else replace(cost, ranks_per_node=arguments.ranks_per_node)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise a ValueError unless KV heads divide the query heads."""
    if num_heads % num_kv_heads:
        below = max(n for n in range(1, min(num_heads, num_kv_heads) + 1) if num_heads % n == 0)
        raise ValueError(
            f"--num-heads {num_heads} is not a multiple of --num-kv-heads {num_kv_heads}; use --num-kv-heads {below}"
        )


def _flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


@contextmanager
def own_flags() -> Iterator[None]:
    """Spell flags in a ValueError as the command line does, not as training does."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for training, here in _TRAINING_FLAGS:
            message = message.replace(training, here)
        raise ValueError(message) from error


@contextmanager
def naming_flag(flag: str, value: object) -> Iterator[None]:
    """Begin a ValueError with the flag that it is about, unless it begins with one."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith("--") else f"{flag} {value}: {message}") from error


def file_plan(path: str) -> Plan:
    """The plan of a file.

    Raises
    ------
    ValueError
        Naming ``--plan``, the file, what is wrong with it and what to do.
    """
    try:
        return read_plan(path)
    except OSError as error:
        raise ValueError(f"--plan {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--plan: {error}") from error


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
    if not items:
        raise ValueError(f"{where}: is empty; give one integer per line, or a JSON list")
    return [_length(json.dumps(item), f"{where}, entry {position}") for position, item in enumerate(items)]


def _length(text: str, where: str) -> int:
    if re.fullmatch("[+]?[0-9]{19,}", text):
        raise ValueError(f"{where}: {text:.40} is larger than any stream")
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{where}: {text:.40} is not an integer; a length is a whole number of tokens")
    if int(text) < 0:
        raise ValueError(f"{where}: {text} is negative; a length is at least 0")
    return int(text)

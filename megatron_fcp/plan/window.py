"""What a rank attends to in each stage when a query sees only so many tokens before it.

A rank's queries come in *runs* without gaps in the stream, and so do the keys of a buffer. Seen from a run, the keys of
earlier runs form a staircase: while the edge of the window moves through a gap of the buffer, all queries see the same
keys; while it moves through a run of keys, each query sees one key less than the one before it::

    keys ->      |---- run ----|  |---- run ----|
    query p      . . . # # # # #  # # # # # # # #      edge inside a run: query i of an item sees keys i and later,
    query p+1    . . . . # # # #  # # # # # # # #      "anticausal"
    ...          . . . . . . . .  # # # # # # # #      edge in the gap: "full"
    ...          . . . . . . . .  # # # # # # # #
                 . . . . . . . .  . # # # # # # #      "anticausal" again

A buffer holds a document's keys side by side, gaps left out, so every item is one range of queries and one of keys, and
each query occurs at most once among the full and anticausal items of a stage: at most two kernel calls, whatever the
distances. With queries and keys taken backwards, "anticausal" is the bottom-right aligned causal mask that every
variable-length kernel has, for items of any shape at once; a window argument, of which a call has one, would have to
differ from item to item.

The local stage has the runs themselves before that, as causal squares with a window. Runs of a document that lie within
one window of each other are one square: nothing in it is hidden but what comes later.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_fcp.plan.arrays import IntArray, frozen
from megatron_fcp.plan.blocks import BlockTable
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.work import LocalFragments, StageWork, empty_stages, local_fragments

FULL, ANTICAUSAL = 0, 1
Items = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]  # kind, q_start, q_stop, kv_start, kv_stop


def windowed_stages(
    table: BlockTable, local_blocks: IntArray, arrived: list[IntArray]
) -> tuple[tuple[StageWork, ...], ...]:
    """Calls of all stages of a rank: the local one, then one stage for each entry of ``arrived`` (ascending blocks)."""
    f = local_fragments(table, local_blocks)
    local, *remote = empty_stages(table, local_blocks, arrived)
    whole = np.zeros(1, dtype=np.int64)
    here = local_calls(table, f, local, whole, whole)
    return (*here, *(remote_calls(table, f, stage, 0, stage.blocks.size) for stage in remote))


def window_of(table: BlockTable) -> int:
    """The window of a table that has one."""
    assert table.window is not None, "the table has no window"
    return table.window


def remote_calls(table: BlockTable, f: LocalFragments, stage: StageWork, low: int, high: int) -> tuple[StageWork, ...]:
    """Calls on blocks ``low:high`` of a remote stage's buffer; at least one, if only an empty one.

    Parameters
    ----------
    table : BlockTable
    f : LocalFragments
    stage : StageWork
        Says what the buffer holds.
    low, high : int
    """
    window = window_of(table)
    arrived = stage.blocks[low:high]
    start, stop = table.shared_start[arrived], table.shared_stop[arrived]
    opens = np.append(True, start[1:] != stop[:-1])[: arrived.size]  # of a run of keys
    first = np.flatnonzero(opens)
    last = np.append(first[1:], arrived.size) - 1 if first.size else first
    keys = start[first], stop[last], stage.block_offset[low:high][first]
    run = _runs(f, np.zeros(0, dtype=np.int64))
    before = np.searchsorted(keys[0], run[1])
    return _calls(stage, None, _below(table, run, before, keys, window), window)


def local_calls(
    table: BlockTable, f: LocalFragments, stage: StageWork, begin: IntArray, part: IntArray
) -> tuple[tuple[StageWork, ...], ...]:
    """Calls of the local stage, part by part; at least one for each part, if only an empty one.

    Parameters
    ----------
    table : BlockTable
    f : LocalFragments
    stage : StageWork
        Says what the buffer holds.
    begin : IntArray, shape [num_pieces]
        Local tokens at which queries are cut, ascending; the first one at or before the first query.
    part : IntArray, shape [num_pieces]
        Part that the queries from each cut on belong to, ascending from 0 without gaps.
    """
    window = window_of(table)
    run = q_start, q_stream, length, document, _ = _runs(f, begin)
    cut = np.isin(q_start, begin).astype(np.int64)
    square = _squares(document, q_stream, length, cut, window)
    first = np.unique(square)
    last = np.append(first[1:], square.size) - 1 if first.size else first
    causal = q_start[first], q_start[last] + length[last]
    items = _below(table, run, square, (q_stream, q_stream + length, q_start), window, cut)

    def of_part(start: IntArray, number: int) -> IntArray:
        return np.flatnonzero(part[np.searchsorted(begin, start, side="right") - 1] == number)

    out: list[tuple[StageWork, ...]] = []
    for number in range(int(part[-1]) + 1 if part.size else 1):
        squares, others = of_part(causal[0], number), of_part(items[1], number)
        chosen = items[0][others], items[1][others], items[2][others], items[3][others], items[4][others]
        out.append(_calls(stage, (causal[0][squares], causal[1][squares]), chosen, window))
    return tuple(out)


def _runs(f: LocalFragments, cuts: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """(first local token, first token in the stream, length, document, fragment) of each run, cut at ``cuts``."""
    opens = np.ones(f.document.size, dtype=bool)
    opens[1:] = (f.document[1:] != f.document[:-1]) | (f.block[1:] != f.block[:-1] + 1)
    first = np.flatnonzero(opens)
    start = np.unique(np.append(f.start[first], cuts[_inside(f, cuts)]))
    fragment = np.searchsorted(f.start, start, side="right") - 1
    whole = np.searchsorted(first, fragment, side="right") - 1  # the run that each piece is cut from
    ends = f.stop[np.append(first[1:], f.document.size) - 1] if first.size else first
    stop = np.minimum(np.append(start[1:], np.iinfo(np.int64).max)[: start.size], ends[whole])
    stream = f.stream[fragment] + start - f.start[fragment]
    return start, stream, stop - start, f.document[fragment], fragment


def _inside(f: LocalFragments, tokens: IntArray) -> IntArray:
    """Those of ``tokens`` that belong to a fragment, as indices."""
    if not f.start.size:
        return np.zeros(0, dtype=np.int64)
    at = np.searchsorted(f.start, tokens, side="right") - 1
    return np.flatnonzero((at >= 0) & (tokens < f.stop[np.maximum(at, 0)]))


def _below(
    table: BlockTable,
    run: tuple[IntArray, IntArray, IntArray, IntArray, IntArray],
    high: IntArray,
    keys: tuple[IntArray, IntArray, IntArray],
    window: int,
    cut: IntArray | None = None,
) -> Items:
    """Full and anticausal items of every run on the runs of keys (stream start, stop, buffer start) before ``high``."""
    q_start, q_stream, length, document, _ = run
    edge = np.maximum(q_stream - window, table.document_start[document])
    low = np.searchsorted(keys[1], edge, side="right")
    most = int((2 * np.maximum(high - low, 0)).sum())
    cut = np.zeros_like(q_start) if cut is None else cut
    kind, q0, q1, k0, k1 = _staircase(q_start, q_stream, length, low, high, *keys, cut, window, most)
    return kind, q0, q1, k0, k1


def _calls(
    stage: StageWork, squares: tuple[IntArray, IntArray] | None, items: Items, window: int
) -> tuple[StageWork, ...]:
    """The causal, full and anticausal call, as far as they have items; never none at all."""
    kind, *columns = items
    out: list[StageWork] = []
    if squares is not None and squares[0].size:
        start, stop = frozen(squares[0]), frozen(squares[1])
        hides = bool((stop - start > window + 1).any())
        square = {"q_start": start, "q_stop": stop, "kv_start": start, "kv_stop": stop}
        out.append(replace(stage, **square, causal=True, anticausal=False, window=window if hides else None))
    for mask in (FULL, ANTICAUSAL):
        chosen = np.flatnonzero(kind == mask)
        if chosen.size or (mask == ANTICAUSAL and not out):
            q_start, q_stop, kv_start, kv_stop = (frozen(column[chosen]) for column in columns)
            ends = {"q_start": q_start, "q_stop": q_stop, "kv_start": kv_start, "kv_stop": kv_stop}
            out.append(replace(stage, **ends, causal=False, anticausal=mask == ANTICAUSAL, window=None))
    return tuple(out)


@njit(cache=True)
def _squares(document: IntArray, stream: IntArray, length: IntArray, cut: IntArray, window: int) -> IntArray:
    """First run of the square that each run belongs to."""
    square = np.empty(document.size, dtype=np.int64)
    first = 0
    for i in range(document.size):
        apart = stream[i] + length[i] - 1 - stream[first] > window
        if i == 0 or document[i] != document[first] or cut[i] or apart:
            first = i
        square[i] = first
    return square


@njit(cache=True)
def _staircase(
    q_start: IntArray,
    q_stream: IntArray,
    length: IntArray,
    low: IntArray,
    high: IntArray,
    key_start: IntArray,
    key_stop: IntArray,
    key_buffer: IntArray,
    cut: IntArray,
    window: int,
    most: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Items of each run of queries on the runs ``low:high`` of keys; ``most`` bounds their number."""
    kind = np.empty(most, dtype=np.int64)
    q0, q1 = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    k0, k1 = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    n = 0
    for i in range(q_start.size):
        if low[i] >= high[i]:
            continue
        last = high[i] - 1
        end = key_buffer[last] + key_stop[last] - key_start[last]
        query, stop, shift = q_stream[i], q_stream[i] + length[i], q_start[i] - q_stream[i]
        joins = not cut[i]
        s = low[i]
        while query < stop and s < high[i]:
            edge = query - window
            if edge >= key_stop[s]:
                s += 1
                continue
            if edge < key_start[s]:
                until, first, mask = min(stop, key_start[s] + window), key_buffer[s], FULL
            else:
                until, first, mask = min(stop, key_stop[s] + window), key_buffer[s] + edge - key_start[s], ANTICAUSAL
                if until - query == 1:
                    mask = FULL
            if (
                joins and mask == FULL and n > 0 and kind[n - 1] == FULL
                and q1[n - 1] == query + shift and k0[n - 1] == first and k1[n - 1] == end
            ):  # fmt: skip
                q1[n - 1] = until + shift
            else:
                kind[n], q0[n], q1[n], k0[n], k1[n] = mask, query + shift, until + shift, first, end
                n += 1
            joins = True
            query = until
    return kind[:n], q0[:n], q1[:n], k0[:n], k1[:n]

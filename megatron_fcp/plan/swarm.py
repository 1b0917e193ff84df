"""Rounds of KV messages in which every rank that holds a unit may pass it on.

Round by round, receivers ask in order of what they still lack; the sender is a holder that is free in this round, and
the message takes those units with the fewest copies so far, so that what only a hot owner holds spreads first. Inside a
node a unit comes in from outside once, through whichever member asks first, and goes round on the fast tier. All
messages of a round take about equally long, so that ranks stay in step even if none starts a round before the last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import BoolArray, FloatArray, IntArray, Scalar, WordArray
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.units import Sharing

TRIES = 24  # free holders that a receiver looks at before it takes one that nearly fills a message


class Transfers(NamedTuple):
    """Unit transfers by round and message.

    Attributes
    ----------
    message_ptr : IntArray, shape [num_messages + 1]
        Transfers of each message.
    src, dst, tier, round : IntArray, shape [num_messages]
        By round.
    unit, share, parent : IntArray, shape [num_transfers]
        What moves, the receiver's share, and the message that brought it to the sender (-1: the sender owns it).
    """

    message_ptr: IntArray
    src: IntArray
    dst: IntArray
    tier: IntArray
    round: IntArray
    unit: IntArray
    share: IntArray
    parent: IntArray


def spread(sharing: Sharing, cp_size: int, ranks_per_node: int, fast: float, blocks_per_round: int) -> Transfers:
    """Schedule all transfers that ``sharing`` needs.

    Parameters
    ----------
    sharing : Sharing
    cp_size, ranks_per_node : int
    fast : float
        How many times faster the tier inside a node is.
    blocks_per_round : int
        Blocks that a message between nodes may carry, once past the first rounds.
    """
    span = sharing.unit_ptr[1:] - sharing.unit_ptr[:-1]
    words = np.append(0, np.cumsum((span[sharing.share_document] + 63) // 64))
    node_share, node_rows = _node_shares(sharing, ranks_per_node)
    return _spread(sharing, words, node_share, node_rows, cp_size, ranks_per_node, fast, blocks_per_round)


def _node_shares(sharing: Sharing, ranks_per_node: int) -> tuple[IntArray, IntArray]:
    """Index of each share's (document, node) group, and the first share of each group with the end appended."""
    node = sharing.share_rank // ranks_per_node
    new = np.ones(node.size, dtype=bool)
    new[1:] = (node[1:] != node[:-1]) | (sharing.share_document[1:] != sharing.share_document[:-1])
    return np.cumsum(new) - 1, np.append(np.flatnonzero(new), node.size)


@njit(cache=True, error_model="numpy")
def _spread(
    sharing: Sharing, words: IntArray, node_share: IntArray, node_rows: IntArray, cp_size: int, ranks_per_node: int,
    fast: float, blocks_per_round: int,
) -> Transfers:  # fmt: skip
    # as locals: in a loop every access to a tuple's array would count a reference
    unit_count, unit_owner, unit_ptr = sharing.unit_count, sharing.unit_owner, sharing.unit_ptr
    share_ptr, share_rank, share_document = sharing.share_ptr, sharing.share_rank, sharing.share_document
    rank_ptr, rank_share = sharing.rank_ptr, sharing.rank_share
    held, want, claimed, remaining, urgency, mean_blocks = _start(sharing, words, node_share, node_rows, cp_size)
    total = remaining.sum()
    src, dst, tiers, rounds, share, parent = np.empty((6, total), np.int64)
    ptr = np.zeros(total + 1, np.int64)
    unit = np.empty(2 * total, np.int64)  # a message's candidates are written behind what has been taken
    by = np.empty(words[-1] * 64, np.int64)  # message that brought a unit to a share
    copies, places = np.ones(unit_count.size, np.int64), np.zeros(cp_size + 2, np.int64)
    missing = np.empty(max((words[1:] - words[:-1]).max(), 1) if words.size > 1 else 1, np.uint64)
    closed = np.zeros(share_rank.size, np.bool_)  # nothing left to bring into the node
    open_ptr = rank_ptr[:-1].copy()  # small shares are done first
    busy = np.full((2, cp_size), -1)  # last round in which a rank sends
    m = n = landed = round_ = 0
    while n < total:
        limit = max(blocks_per_round >> max(0, 2 - round_ // 12), 1)
        waiting = np.flatnonzero(urgency)
        order = waiting[np.argsort(-urgency[waiting], kind="mergesort")]
        for tier in range(1, -1 if ranks_per_node > 1 else 0, -1):
            cap = limit if tier else max(int(limit * fast), 1)
            for r in order:
                while open_ptr[r] < rank_ptr[r + 1] and not remaining[rank_share[open_ptr[r]]]:
                    open_ptr[r] += 1
                e, o = _match(
                    r, open_ptr[r], tier, round_, cap, share_ptr, share_rank, share_document, rank_share, rank_ptr,
                    words, node_share, node_rows, held, want, claimed, remaining, closed, mean_blocks, busy, missing,
                )  # fmt: skip
                if e < 0:
                    continue
                taken = _take(
                    e, o, tier, cap, unit_count, unit_ptr, share_document, words, node_rows[node_share[e]], held, want,
                    claimed, copies, places, unit, n,
                )  # fmt: skip
                base, s = unit_ptr[share_document[e]], share_rank[o]
                for i in range(n, n + taken):
                    u = unit[i]
                    share[i] = e
                    parent[i] = -1 if unit_owner[u] == s else by[words[o] * 64 + u - base]
                    by[words[e] * 64 + u - base] = m
                    urgency[r] -= unit_count[u]
                remaining[e] -= taken
                n += taken
                src[m], dst[m], tiers[m], rounds[m] = s, r, tier, round_
                m += 1
                ptr[m] = n
                busy[tier, s] = round_
        for i in range(landed, n):  # what arrives in a round can be passed on from the next
            index = unit[i] - unit_ptr[share_document[share[i]]]
            held[words[share[i]] + (index >> 6)] |= np.uint64(1) << np.uint64(index & 63)
        landed = n
        round_ += 1
    return Transfers(ptr[: m + 1], src[:m], dst[:m], tiers[:m], rounds[:m], unit[:total], share, parent)


@njit(cache=True, error_model="numpy")
def _start(
    sharing: Sharing, words: IntArray, node_share: IntArray, node_rows: IntArray, cp_size: int
) -> tuple[WordArray, WordArray, WordArray, IntArray, IntArray, FloatArray]:
    """What shares hold, want and have claimed for their node, by first share of the node; units that remain by share,
    blocks that remain by rank, and the mean blocks per unit of every document."""
    unit_count, unit_owner, unit_ptr = sharing.unit_count, sharing.unit_owner, sharing.unit_ptr
    share_rank, share_document, share_stop = sharing.share_rank, sharing.share_document, sharing.share_stop
    one = np.uint64(1)
    held, want, claimed = np.zeros((3, words[-1]), np.uint64)
    remaining, urgency = np.zeros(share_rank.size, np.int64), np.zeros(cp_size, np.int64)
    for e in range(share_rank.size):
        d, r = share_document[e], share_rank[e]
        base = unit_ptr[d]
        c = words[node_rows[node_share[e]]]
        for u in range(base, unit_ptr[d + 1]):
            w, bit = (u - base) >> 6, one << np.uint64((u - base) & 63)
            if unit_owner[u] == r:
                held[words[e] + w] |= bit
                claimed[c + w] |= bit
            elif u < share_stop[e]:
                want[words[e] + w] |= bit
                remaining[e] += 1
                urgency[r] += unit_count[u]
    mean_blocks = np.zeros(unit_ptr.size - 1)
    for u in range(unit_count.size):
        d = sharing.unit_document[u]
        mean_blocks[d] += unit_count[u] / (unit_ptr[d + 1] - unit_ptr[d])
    return held, want, claimed, remaining, urgency, mean_blocks


@njit(cache=True, error_model="numpy")
def _match(
    r: int, begin: Scalar, tier: int, round_: int, cap: int, share_ptr: IntArray, share_rank: IntArray,
    share_document: IntArray, rank_share: IntArray, rank_ptr: IntArray, words: IntArray, node_share: IntArray,
    node_rows: IntArray, held: WordArray, want: WordArray, claimed: WordArray, remaining: IntArray, closed: BoolArray,
    mean_blocks: FloatArray, busy: IntArray, missing: WordArray,
) -> tuple[Scalar, Scalar]:  # fmt: skip
    """The receiver's and the sender's share for this round; (-1, -1) if nobody who is free has what ``r`` lacks."""
    best_e, best_o, most = -1, -1, 0.0
    tries = 0
    for i in range(begin, rank_ptr[r + 1]):
        e = rank_share[i]
        if not remaining[e] or (tier == 1 and closed[e]):
            continue
        d = share_document[e]
        inside_low, inside_high = node_rows[node_share[e]], node_rows[node_share[e] + 1]
        low, high = (inside_low, inside_high) if tier == 0 else (share_ptr[d], share_ptr[d + 1])
        at, claim = words[e], words[inside_low]
        first_word, stop_word = -1, 0  # of those in which something is missing
        for w in range(words[e + 1] - words[e]):
            x = want[at + w]
            if tier == 1:
                x &= ~claimed[claim + w]
            missing[w] = x
            if x != 0:
                stop_word = w + 1
                if first_word < 0:
                    first_word = w
        if first_word < 0:
            closed[e] = True
            continue
        turn = low + (r * 5 + round_ * 3) % (high - low)
        for j in range(high - low):
            o = turn + j
            if o >= high:
                o -= high - low
            if busy[tier, share_rank[o]] == round_ or (tier == 1 and inside_low <= o < inside_high):
                continue
            tries += 1
            units = 0
            for w in range(first_word, stop_word):
                x = missing[w] & held[words[o] + w]
                if x != 0:
                    units += count_bits(x)
            count = units * mean_blocks[d]
            if count >= cap:
                return e, o
            if count > most:
                best_e, best_o, most = e, o, count
            if tries >= TRIES and most * 4 >= cap * 3:
                return best_e, best_o
    return best_e, best_o


@njit(cache=True, error_model="numpy")
def _take(
    e: int, o: int, tier: int, cap: int, unit_count: IntArray, unit_ptr: IntArray, share_document: IntArray,
    words: IntArray, group: Scalar, held: WordArray, want: WordArray, claimed: WordArray, copies: IntArray,
    places: IntArray, unit: IntArray, n: int,
) -> int:  # fmt: skip
    """Move the rarest units of share ``o`` that share ``e`` lacks into a message; returns how many."""
    d = share_document[e]
    base = unit_ptr[d]
    found = n
    blocks = 0
    for w in range(words[e + 1] - words[e]):
        x = want[words[e] + w] & held[words[o] + w]
        if tier == 1:
            x &= ~claimed[words[group] + w]
        while x != 0:
            u = base + w * 64 + lowest_bit(x)
            x &= x - np.uint64(1)
            unit[found] = u
            found += 1
            blocks += unit_count[u]
    taken = found - n
    if blocks > cap:
        if tier == 1:  # inside a node everyone gets everything soon, so order hardly matters
            _sort_by_copies(unit[n:found], copies, places)
        taken = blocks = 0
        for i in range(n, found):
            u = unit[i]
            if taken and blocks + unit_count[u] > cap:
                continue
            unit[i], unit[n + taken] = unit[n + taken], u
            taken += 1
            blocks += unit_count[u]
            if blocks * 20 >= cap * 19:
                break
    one = np.uint64(1)
    for i in range(n, n + taken):
        w, bit = (unit[i] - base) >> 6, one << np.uint64((unit[i] - base) & 63)
        want[words[e] + w] &= ~bit
        if tier == 1:
            claimed[words[group] + w] |= bit
        copies[unit[i]] += 1
    unit[n : n + taken].sort()
    return taken


@njit(cache=True, error_model="numpy")
def _sort_by_copies(unit: IntArray, copies: IntArray, places: IntArray) -> None:
    """Rarest units first, equally rare ones in order; ``places`` is scratch, zero before and after."""
    least, most = copies[unit[0]], 0
    for u in unit:
        least, most = min(least, copies[u]), max(most, copies[u])
        places[copies[u] + 1] += 1
    for k in range(least, most + 1):
        places[k + 1] += places[k]
    unsorted = unit.copy()
    for u in unsorted:
        unit[places[copies[u]]] = u
        places[copies[u]] += 1
    places[least : most + 2] = 0


@njit(cache=True, error_model="numpy")
def count_bits(x: Scalar) -> Scalar:
    """Bits set in a 64-bit word."""
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(cache=True, error_model="numpy")
def lowest_bit(x: Scalar) -> Scalar:
    """Index of the lowest bit set in a word that is not 0."""
    return count_bits((x & (~x + np.uint64(1))) - np.uint64(1))

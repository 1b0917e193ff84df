"""What ranks still need while pieces are handed out, and which of them should take the next one.

A rank needs price: the most that its free slots could not make up for with the cheapest blocks comes first. Ranks are
looked at in groups whose largest needs are known, so that a piece looks at few of them however many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_fcp.plan.arrays import FloatArray, IntArray, Scalar
from megatron_fcp.plan.jit import njit
from megatron_fcp.plan.shape import BlockShapes

GROUP = 16  # ranks that are passed over together
NEIGHBOUR = 0.7  # of the densest need that is enough for a rank that holds the block next to a piece


class Prefixes(NamedTuple):
    """How much of which documents nodes fetch: lists, since most documents are fetched by few nodes.

    Attributes
    ----------
    first : IntArray, shape [num_far_documents]
        First entry of a document's list, -1 without one.
    node, tokens, following : IntArray, shape [num_blocks]
        Of an entry: a node, the prefix that it fetches, and the next entry of the same document.
    size : IntArray, shape [1]
        Entries in use.
    row : IntArray, shape [num_nodes]
        One document's list spread out, while it is looked at; zero otherwise.
    """

    first: IntArray
    node: IntArray
    tokens: IntArray
    following: IntArray
    size: IntArray
    row: IntArray


class Needs(NamedTuple):
    """What ranks still want, and what their nodes fetch.

    Attributes
    ----------
    left, room, need : FloatArray, IntArray, FloatArray, shape [cp_size]
        Price and blocks up to what is meant for the rank, and price per block; -inf where there is no room.
    spare : FloatArray, shape [cp_size]
        What is left of the price if all its room went to the cheapest blocks.
    most_need, most_spare, most_room : FloatArray, FloatArray, IntArray, shape [num_groups]
        Largest ones among every ``GROUP`` consecutive ranks.
    fetched : FloatArray, shape [num_nodes]
        Tokens that a node fetches.
    have : Prefixes
    """

    left: FloatArray
    room: IntArray
    need: FloatArray
    spare: FloatArray
    most_need: FloatArray
    most_spare: FloatArray
    most_room: IntArray
    fetched: FloatArray
    have: Prefixes


@njit(cache=True)
def all_needs(target: FloatArray, slots: int, cheap: float, far: IntArray, ranks_per_node: int) -> Needs:
    """Needs of ranks that hold nothing yet; ``far`` is the dense index of the documents whose prefixes are noted."""
    num_nodes = (target.size + ranks_per_node - 1) // ranks_per_node
    num_groups = (target.size + GROUP - 1) // GROUP
    need, spare = target / slots, target - slots * cheap
    most_need, most_spare = np.empty(num_groups), np.empty(num_groups)
    for g in range(num_groups):
        most_need[g] = need[g * GROUP : (g + 1) * GROUP].max()
        most_spare[g] = spare[g * GROUP : (g + 1) * GROUP].max()
    node, tokens, following = np.empty((3, slots * target.size), dtype=np.int64)
    first = np.full(max(far.max() + 1 if far.size else 0, 1), -1)
    size, row = np.zeros(1, dtype=np.int64), np.zeros(num_nodes, dtype=np.int64)
    have = Prefixes(first, node, tokens, following, size, row)
    room = np.full(target.size, slots)
    most_room = np.full(num_groups, slots)
    return Needs(target.copy(), room, need, spare, most_need, most_spare, most_room, np.zeros(num_nodes), have)


@njit(cache=True)
def give(
    rank: int, block: int, count: int, price: Scalar, needs: Needs, cheap: float, shapes: BlockShapes, far: IntArray,
    ranks_per_node: int,
) -> None:  # fmt: skip
    """Note that ``rank`` takes blocks of that price, and that its node needs what lies before them."""
    needs.left[rank] -= price
    needs.room[rank] -= count
    full = needs.room[rank] == 0
    needs.need[rank] = -np.inf if full else needs.left[rank] / needs.room[rank]
    needs.spare[rank] = -np.inf if full else needs.left[rank] - needs.room[rank] * cheap
    g = rank // GROUP
    needs.most_need[g] = needs.need[g * GROUP : (g + 1) * GROUP].max()
    needs.most_spare[g] = needs.spare[g * GROUP : (g + 1) * GROUP].max()
    needs.most_room[g] = needs.room[g * GROUP : (g + 1) * GROUP].max()
    d = shapes.head[block]
    if d < 0:
        return
    node = rank // ranks_per_node
    position = shapes.head_position[block]
    if far[d] < 0:
        needs.fetched[node] += position
        return
    have = needs.have
    e = have.first[far[d]]
    while e >= 0 and have.node[e] != node:
        e = have.following[e]
    if e < 0:
        e = have.size[0]
        have.size[0] += 1
        have.node[e], have.tokens[e], have.following[e] = node, 0, have.first[far[d]]
        have.first[far[d]] = e
    if position > have.tokens[e]:
        needs.fetched[node] += position - have.tokens[e]
        have.tokens[e] = position


@njit(cache=True)
def neediest(
    block: int, count: int, price: Scalar, needs: Needs, cheap: float, owner: IntArray, shapes: BlockShapes,
    far: IntArray, bearable: float, ranks_per_node: int,
) -> tuple[int, float]:  # fmt: skip
    """Rank that should take some blocks, and what it has left then, negative if too little; (-1, 0) without room."""
    d = shapes.head[block]
    if d < 0:
        return _densest(block, count, price, 0, -1, needs, cheap, owner, bearable, ranks_per_node)
    position = shapes.head_position[block]
    if far[d] < 0:
        return _densest(block, count, price, position, -1, needs, cheap, owner, bearable, ranks_per_node)
    have = needs.have
    e = have.first[far[d]]
    while e >= 0:
        have.row[have.node[e]] = have.tokens[e]
        e = have.following[e]
    found = _densest(block, count, price, position, have.first[far[d]], needs, cheap, owner, bearable, ranks_per_node)
    e = have.first[far[d]]
    while e >= 0:
        have.row[have.node[e]] = 0
        e = have.following[e]
    return found


@njit(cache=True)
def _densest(
    block: int, count: int, price: Scalar, position: Scalar, entry: Scalar, needs: Needs, cheap: float, owner: IntArray,
    bearable: float, ranks_per_node: int,
) -> tuple[int, float]:  # fmt: skip
    """Rank with room that needs the most price per free slot and can bear these blocks; else the one it hurts least.

    Ranks whose node fetches what lies before the blocks anyway come first, those whose node fetches enough come last.
    Also returns what the rank has left then, negative if too little.
    """
    room, need, spare, fetched, row = needs.room, needs.need, needs.spare, needs.fetched, needs.have.row
    most_need, most_spare, most_room = needs.most_need, needs.most_spare, needs.most_room
    best = -1
    wanted = price - count * cheap  # of what a rank can spare
    for g in range(most_need.size):
        if most_spare[g] < wanted or most_room[g] < count or (best >= 0 and most_need[g] <= need[best]):
            continue
        for r in range(g * GROUP, min((g + 1) * GROUP, need.size)):
            if room[r] < count or spare[r] < wanted or (best >= 0 and need[r] <= need[best]):
                continue
            node = r // ranks_per_node
            extra = position - row[node]
            if extra <= 0 or fetched[node] + extra <= bearable * ranks_per_node or spare[r] >= wanted + price:
                best = r
    for b in (block - 1, block + count):  # a rank that holds a neighbour saves a cut
        if best >= 0 and 0 <= b < owner.size and owner[b] >= 0:
            r = owner[b]
            if room[r] >= count and spare[r] >= wanted and need[r] >= NEIGHBOUR * need[best]:
                return r, 0.0
    if best >= 0:
        near = _nearest(position, count, wanted, entry, needs, ranks_per_node)
        return near if near >= 0 else best, 0.0
    return _least_hurt(position, count, price, wanted, needs, bearable, ranks_per_node)


@njit(cache=True)
def _nearest(position: Scalar, count: int, wanted: Scalar, entry: Scalar, needs: Needs, ranks_per_node: int) -> int:
    """The neediest rank that can bear the blocks and whose node has what lies before them; -1 without one."""
    room, need, spare = needs.room, needs.need, needs.spare
    node, tokens, following = needs.have.node, needs.have.tokens, needs.have.following
    near = -1
    while entry >= 0:
        low = node[entry] * ranks_per_node
        for r in range(low, min(low + ranks_per_node, need.size)):
            if tokens[entry] < position or room[r] < count or spare[r] < wanted:
                continue
            if near < 0 or need[r] > need[near] or (need[r] == need[near] and r < near):
                near = r
        entry = following[entry]
    return near


@njit(cache=True)
def _least_hurt(
    position: Scalar, count: int, price: Scalar, wanted: Scalar, needs: Needs, bearable: float, ranks_per_node: int,
) -> tuple[int, float]:  # fmt: skip
    """Rank with room that has the most left after taking the blocks, and how much; -1 without one."""
    room, spare, most_room, most_spare = needs.room, needs.spare, needs.most_room, needs.most_spare
    fetched, row = needs.fetched, needs.have.row
    rank, most = -1, 0.0
    for g in range(most_spare.size):
        if most_room[g] < count or (rank >= 0 and most_spare[g] - wanted <= most):
            continue
        for r in range(g * GROUP, min((g + 1) * GROUP, spare.size)):
            left = spare[r] - wanted
            if room[r] < count or (rank >= 0 and left <= most):
                continue
            node = r // ranks_per_node
            extra = position - row[node]
            if extra > 0 and fetched[node] + extra > bearable * ranks_per_node:
                left -= price
            if rank < 0 or left > most:
                rank, most = r, left
    return rank, most

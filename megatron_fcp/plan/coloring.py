"""Edge colouring of the sender-receiver graph: rounds in which nobody sends or receives twice.

A maximum matching per round is not round-optimal: with edges A-x, A-y, B-x, C-y (maximum degree 2) the maximum matching
{B-x, C-y} leaves A two more rounds. Colouring edges one at a time along alternating paths uses exactly as many colours
as the maximum degree (Koenig 1916), for multigraphs too.
"""

from __future__ import annotations

import numpy as np

from megatron_fcp.plan.arrays import IntArray
from megatron_fcp.plan.jit import njit


def max_degree(src: IntArray, dst: IntArray) -> int:
    """Largest number of messages that one rank sends, or that one rank receives."""
    if src.size == 0:
        return 0
    return int(max(np.bincount(src).max(), np.bincount(dst).max()))


def color_edges(src: IntArray, dst: IntArray, num_ranks: int) -> IntArray:
    """Round of each message, shape [num_messages]; uses rounds ``0 .. max_degree - 1``.

    Parameters
    ----------
    src, dst : IntArray, shape [num_messages]
        Sender and receiver of each message; pairs may repeat.
    num_ranks : int

    References
    ----------
    D. Koenig, "Ueber Graphen und ihre Anwendung auf Determinantentheorie und Mengenlehre", Math. Ann. 77, 1916.
    """
    return _color(np.asarray(src), np.asarray(dst), num_ranks, max_degree(src, dst))


@njit(cache=True)
def _color(src: IntArray, dst: IntArray, num_ranks: int, degree: int) -> IntArray:
    color = np.full(src.size, -1, dtype=np.int64)
    at_src = np.full((num_ranks, degree), -1, dtype=np.int64)  # edge of that colour at the sender
    at_dst = np.full((num_ranks, degree), -1, dtype=np.int64)
    path = np.empty(2 * num_ranks + 1, dtype=np.int64)
    for edge in range(src.size):
        u, v = src[edge], dst[edge]
        a, b, both = -1, -1, -1
        for c in range(degree):
            free_u, free_v = at_src[u, c] < 0, at_dst[v, c] < 0
            if free_u and free_v:
                both = c
                break
            if free_u and a < 0:
                a = c
            if free_v and b < 0:
                b = c
        if both < 0:
            # v is taken at a, u at b: swapping a and b along the path that starts at v frees a there, and the path
            # cannot reach u, where a is free.
            length = 0
            node, c, on_dst = v, a, True
            while True:
                step = at_dst[node, c] if on_dst else at_src[node, c]
                if step < 0:
                    break
                path[length] = step
                length += 1
                node = src[step] if on_dst else dst[step]
                on_dst = not on_dst
                c = a + b - c
            for i in range(length):
                at_src[src[path[i]], color[path[i]]] = -1
                at_dst[dst[path[i]], color[path[i]]] = -1
            for i in range(length):
                swapped = a + b - color[path[i]]
                color[path[i]] = swapped
                at_src[src[path[i]], swapped] = path[i]
                at_dst[dst[path[i]], swapped] = path[i]
            both = a
        color[edge] = both
        at_src[u, both] = edge
        at_dst[v, both] = edge
    return color

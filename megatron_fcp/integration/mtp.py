"""Multi-token prediction: tokens, labels and masks move one place to the left, wherever their neighbours lie.

Megatron rolls by its own sharding of whole samples. A layout of FCP, or a packed batch, has other neighbours: the token
after the last one of a block may be on any rank, and the last token of a document has none. Every rank therefore hands
out the first token of each of its runs of consecutive tokens (an all-gather of a few numbers per block), and takes the
rest from its own::

    rank 0 holds  0 1 | 6 7     hands out 0 and 6, takes 2 from rank 1
    rank 1 holds  2 3 | 4 5     hands out 2 (4 follows 3 at home), takes 6 from rank 0

See https://github.com/NVIDIA/Megatron-LM/issues/4495 and https://github.com/NVIDIA/Megatron-LM/issues/7498.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from megatron_fcp.integration import session
from megatron_fcp.integration.layouts import Layout
from megatron_fcp.integration.packed import layout_of

_FACTOR = "fcp_factor"
_kept: WeakKeyDictionary[Layout, dict[torch.device, Successors]] = WeakKeyDictionary()


class Successors:
    """Where the token after each local token is found.

    Parameters
    ----------
    layout : Layout
    group : ProcessGroup
        The context-parallel group; all its ranks make theirs for the same batch together.
    device : torch.device
        Where the tensors to roll are.
    """

    def __init__(self, layout: Layout, group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        self._group = group
        index, offsets = layout.index, layout.boundaries.offsets
        heads = np.flatnonzero(np.diff(index, prepend=-2) != 1)  # where a run of consecutive tokens begins
        longest = torch.tensor(heads.size, device=device)
        torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group)
        heads = np.append(heads, np.zeros(int(longest) - heads.size, np.int64))  # as many from every rank
        self._heads = torch.from_numpy(heads).to(device)
        everywhere = self._gather(torch.from_numpy(index.copy()).to(device)).cpu().numpy()

        starts, ends = offsets[:-1], offsets[1:]
        filled = starts < ends
        starts, ends = starts[filled], ends[filled]
        document = np.searchsorted(starts, index, side="right") - 1
        has_next = index + 1 < ends[document] if starts.size else np.zeros(index.size, bool)
        at_home = np.append(np.diff(index) == 1, False)
        order = np.argsort(everywhere, kind="stable")
        places = np.searchsorted(everywhere[order], index + 1).clip(max=order.size - 1)
        elsewhere = order[places]
        assert (everywhere[elsewhere] == index + 1)[has_next & ~at_home].all(), "a token that no rank holds"
        source = np.where(at_home, np.arange(1, index.size + 1), index.size + elsewhere)
        nothing = index.size + everywhere.size  # where a zero is kept
        self._source = torch.from_numpy(np.where(has_next, source, nothing)).to(device)

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """First values of the runs of every rank, by rank."""
        mine = values[self._heads].contiguous()
        everywhere = torch.empty(mine.numel() * self._group.size(), dtype=mine.dtype, device=mine.device)
        torch.distributed.all_gather_into_tensor(everywhere, mine, group=self._group)
        return everywhere

    def roll(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of each token's successor in its document, 0 for a document's last token and for padding.

        Parameters
        ----------
        tensor : Tensor, shape [num_samples, tokens_per_sample_and_rank]
            Local tokens running down the columns, as in a batch.
        """
        stream = tensor.t().reshape(-1)
        pool = torch.cat([stream, self._gather(stream), stream.new_zeros(1)])
        return pool[self._source].view(-1, tensor.shape[0]).t().contiguous()


def successors(layout: Layout, group: torch.distributed.ProcessGroup, device: torch.device) -> Successors:
    """The :class:`Successors` of a layout, made once."""
    made = _kept.setdefault(layout, {})
    if device not in made:
        made[device] = Successors(layout, group, device)
    return made[device]


def wrap_roll_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: rolls by the layout of the batch, and counts the valid tokens that are left in the whole group.

    A loss mask loses one where a document ends. Its divisor is the mean over the group in place of the rank's own
    number, so that the average over the group's ranks is the mean over all tokens. Megatron divides by 1 at least, so
    where there are fewer valid tokens than ranks the divisor is 1 and the mask makes up for it.
    """

    def roll_tensor(tensor: Any, shifts: int = -1, dims: int = -1, cp_group: Any = None, **kwargs: Any) -> Any:
        run, packed_seq_params = session.current(), kwargs.get("packed_seq_params")
        if run is None or tensor is None or (packed_seq_params is None and not run.settings.resident):
            rolled, count = original(tensor, shifts, dims, cp_group, **kwargs)
        else:
            assert (tensor.dim(), shifts) == (2, -1), "Megatron rolls batches by one place"
            assert dims in (-1, 1), "Megatron rolls along the sequence"
            group = session.cp_group() if cp_group is None else cp_group
            layout = layout_of(packed_seq_params, tensor.numel(), tensor.shape[0], group.rank())
            rolled = successors(layout, group, tensor.device).roll(tensor)
            count = rolled.sum()
        if run is None or cp_group is None or cp_group.size() == 1 or rolled is None or count is None:
            return rolled, count
        if not rolled.is_floating_point():
            return rolled, count  # tokens and labels; a mask is one of weights
        rolled = rolled / getattr(tensor, _FACTOR, 1.0)
        total = rolled.sum()
        torch.distributed.all_reduce(total, group=cp_group)
        mean = total / cp_group.size()
        factor = torch.where(total > 0, 1 / mean, 1.0).clamp(min=1.0)
        rolled = rolled * factor
        setattr(rolled, _FACTOR, factor)  # the next depth rolls this mask again
        return rolled, mean * factor

    return roll_tensor

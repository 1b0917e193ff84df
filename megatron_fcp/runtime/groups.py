"""FCP's process groups; for NCCL also its priority over compute, and how many SMs it may take.

NCCL's kernels run on SMs that attention would use too. On a high-priority stream they get theirs as soon as blocks of
an attention kernel end; a limit of CTAs bounds what they take. Not yet run on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_fcp.config import check_at_least


def nccl_options(max_ctas: int | None = None) -> Any:
    """``pg_options`` for ``torch.distributed.new_group``; None where this torch has none, with a warning.

    Parameters
    ----------
    max_ctas : int, optional
        Thread blocks, each on an SM, that one NCCL kernel may use; None leaves NCCL's choice.

    Raises
    ------
    ValueError
        If ``max_ctas`` is not a positive integer.
    """
    if max_ctas is not None:
        check_at_least("the limit of NCCL CTAs", max_ctas, 1)
    backend = getattr(dist, "ProcessGroupNCCL", None)
    if backend is None:
        warnings.warn("this torch has no options for NCCL groups; FCP's traffic runs at NCCL's defaults", stacklevel=2)
        return None
    options = backend.Options(is_high_priority_stream=True)
    if max_ctas is not None:
        config = getattr(options, "config", None)
        if config is None or not hasattr(config, "max_ctas"):
            warnings.warn(
                f"this torch cannot limit NCCL's CTAs, so the limit of {max_ctas} is ignored; NCCL_MAX_CTAS sets it "
                "for the whole job",
                stacklevel=2,
            )
        else:
            config.min_ctas, config.max_ctas = 1, max_ctas
    return options


def make_groups(
    ranks: Sequence[int], setup_s: float, name: str, device: torch.device, max_ctas: int | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(transfers, control) groups of ``ranks``: one gloo group on CPUs, NCCL with gloo beside it on GPUs.

    Called by the members only.

    Raises
    ------
    ValueError
        If the ranks do not ascend.
    """
    if sorted(set(ranks)) != list(ranks):
        raise ValueError(f"the ranks of a group must ascend, got {list(ranks)}")

    def make(backend: str, what: str) -> dist.ProcessGroup:
        timeout = timedelta(seconds=setup_s)
        options = nccl_options(max_ctas) if backend == "nccl" else None
        if options is not None:
            options._timeout = timeout  # else torch warns, on every rank, of the one that is not used
        group = dist.new_group(
            list(ranks),
            backend=backend,
            timeout=timeout,
            use_local_synchronization=True,
            group_desc=f"{name} {what}",
            pg_options=options,
        )
        assert isinstance(group, dist.ProcessGroup), f"global rank {dist.get_rank()} is not one of {list(ranks)}"
        return group

    if device.type == "cpu":
        group = make("gloo", "transfers")
        return group, group
    return make("nccl", "transfers"), make("gloo", "control")

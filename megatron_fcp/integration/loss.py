"""The loss stays the mean over all valid tokens of a batch, however unevenly the ranks hold them.

Without ``--calculate-per-token-loss`` Megatron divides each rank's summed loss by that rank's own number of valid
tokens and averages over the context-parallel group: right only where every rank holds as many. Here the divisor is the
group's number, so the loss and its gradient are those of one rank with all tokens. (With the flag, Megatron divides by
the global number itself.) See https://github.com/NVIDIA/Megatron-LM/issues/1764.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fcp.integration import session


def wrap_forward_step_calc_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam: the schedule's normalisation of the loss."""

    def forward_step_calc_loss(
        model: Any,
        output_tensor: Any,
        loss_func: Any,
        config: Any,
        vp_stage: Any,
        collect_non_loss_data: Any,
        num_microbatches: Any,
        forward_data_store: Any,
        cp_group_size: Any = None,
        is_last_stage: Any = None,
    ) -> Any:
        run = session.current()
        averaged_here = not config.calculate_per_token_loss and not collect_non_loss_data
        if loss_func is not None and averaged_here and run is not None and run.settings.cp_size > 1:
            loss_func = over_group(loss_func, run.settings.cp_size)
        return original(
            model,
            output_tensor,
            loss_func,
            config,
            vp_stage,
            collect_non_loss_data,
            num_microbatches,
            forward_data_store,
            cp_group_size,
            is_last_stage,
        )

    return forward_step_calc_loss


def over_group(loss_func: Callable[..., Any], cp_size: int) -> Callable[..., Any]:
    """``loss_func`` with the group's number of valid tokens in place of the rank's.

    The gradients of the group's ranks are averaged later, hence the factor ``cp_size``. Loss functions that return a
    mean already (two values) stay as they are.
    """

    def normalised(output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(output_tensor, *args, **kwargs)
        if len(outputs) != 3:
            return outputs
        loss, num_tokens, report = outputs
        total = torch.as_tensor(num_tokens, device=loss.device).clone()
        torch.distributed.all_reduce(total, group=session.cp_group())
        return loss * cp_size, total, report

    return normalised

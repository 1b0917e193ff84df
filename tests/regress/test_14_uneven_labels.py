"""Gradients when valid labels are uneven over ranks: none valid, one token, all on one rank, all.

https://github.com/NVIDIA/Megatron-LM/issues/1764, https://github.com/volcengine/verl/issues/5983
"""

import dataclasses

import pytest
import torch

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import Model, check_in_threads, random_inputs

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
@pytest.mark.parametrize("valid", ["none", "one token", "all on one rank", "all"])
def test_gradients_follow_the_valid_labels(valid: str, layout: str) -> None:
    model = Model(layout=layout)  # type: ignore[arg-type]
    plan = make_plan([30, 9, 20], cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=4))
    x = random_inputs(plan, model, 1)
    keep = torch.zeros(plan.table.num_tokens, dtype=torch.bool)
    if valid == "one token":
        keep[25] = True
    elif valid == "all on one rank":
        keep[torch.from_numpy(plan.rank_plan(2).local_token_global_indices.copy())] = True
    elif valid == "all":
        keep[:] = True
    got = check_in_threads(plan, model, x=dataclasses.replace(x, dout=x.dout * keep[:, None, None]))
    if valid == "none":
        assert all((grad == 0).all() for grad in (got.dq, got.dk, got.dv))
    else:
        assert all((grad != 0).any() for grad in (got.dq, got.dk, got.dv))

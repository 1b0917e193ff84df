"""Keys of documents whose length the context-parallel size does not divide are silently dropped.

https://github.com/NVIDIA/TransformerEngine/issues/1930, https://github.com/NVIDIA/TransformerEngine/issues/3331
"""

import pytest

from megatron_fcp.config import FcpConfig, Mask
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import Model, check_in_threads

pytestmark = pytest.mark.runtime

LAYOUTS = ("resident", "reshuffle")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("length", "cp_size", "block_size", "tokens_per_rank"), [(7, 2, 2, 4), (698, 4, 16, 176)])
def test_reported_lengths(length: int, cp_size: int, block_size: int, tokens_per_rank: int, layout: str) -> None:
    for num_heads, num_kv_heads in ((2, 2), (4, 2)):
        for mask in ("causal", "full"):
            config = FcpConfig(block_size=block_size, mask=mask)
            plan = make_plan([length], cp_size=cp_size, tokens_per_rank=tokens_per_rank, config=config)
            check_in_threads(plan, Model(num_heads, num_kv_heads, layout=layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_every_length_around_the_blocks(cp_size: int, mask: Mask) -> None:
    block = 4
    for length in range(1, 3 * block + 2):
        tokens_per_rank = block * -(-length // (block * cp_size))
        config = FcpConfig(block_size=block, mask=mask)
        plan = make_plan([length], cp_size=cp_size, tokens_per_rank=tokens_per_rank, config=config)
        check_in_threads(plan, Model(layout=LAYOUTS[length % 2]))  # type: ignore[arg-type]

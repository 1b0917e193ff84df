"""Unequal head dims of keys and values (MLA: 192 and 128), and one KV head for all.

https://github.com/NVIDIA/TransformerEngine/issues/2868, https://github.com/NVIDIA/TransformerEngine/issues/1552
"""

import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import Model, check_in_threads

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
@pytest.mark.parametrize("kernel", ["torch-cpu", "reference"])
@pytest.mark.parametrize(
    "heads", [(4, 4, 192, 128), (4, 1, 64, 64), (2, 1, 8, 24), (1, 1, 1, 1)], ids=["MLA", "MQA", "wide values", "one"]
)
def test_heads(heads: tuple[int, int, int, int], kernel: str, layout: str) -> None:
    plan = make_plan([25, 30], cp_size=4, tokens_per_rank=16, config=FcpConfig(block_size=4))
    check_in_threads(plan, Model(*heads, kernel=kernel, layout=layout))  # type: ignore[arg-type]

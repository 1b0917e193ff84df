"""Documents shorter than the number of ranks, and fewer blocks of text than ranks, crash or read out of range.

https://github.com/volcengine/verl/issues/5981, https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5614
"""

import pytest

from megatron_fcp.config import FcpConfig
from megatron_fcp.plan import make_plan
from megatron_fcp.testing.attention_check import Model, check_in_threads

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
@pytest.mark.parametrize(
    ("cp_size", "documents"),
    [
        (2, [1]),
        (2, [2]),
        (2, [1, 2]),
        *((4, [n]) for n in range(1, 7)),
        (4, [1, 2, 3, 4, 5, 6]),
        (8, [1] * 11),
        (8, []),
    ],
    ids=str,
)
def test_short_documents(cp_size: int, documents: list[int], layout: str) -> None:
    for block_size in (1, 2, 8):
        plan = make_plan(documents, cp_size=cp_size, tokens_per_rank=8, config=FcpConfig(block_size=block_size))
        check_in_threads(plan, Model(layout=layout))  # type: ignore[arg-type]

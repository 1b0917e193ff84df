"""Ranks that were given different batches hang in each other's collectives instead of failing together.

https://github.com/bghira/SimpleTuner/issues/2143, https://github.com/OpenPipe/ART/issues/840
"""

import pytest

from megatron_fcp.runtime import Communicator, PlanMismatch
from megatron_fcp.testing.gloo_pool import GlooPool

pytestmark = pytest.mark.runtime


def agree(comm: Communicator, digests: list[str]) -> str:
    try:
        comm.agree(digests[comm.rank], "the plan of batch 3")
    except PlanMismatch as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        (["a", "a", "a"], "agreed"),
        (["a", "a", "b"], "rank 2 differs from ranks 0 and 1"),
        (["b", "a", "a"], "rank 0 differs from ranks 1 and 2"),
        (["a", "b", "c"], "ranks 1 and 2 differ from rank 0"),
        (["a", "b"], "rank 1 differs from rank 0"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_all_ranks_name_those_that_differ(gloo: GlooPool, digests: list[str], words: str) -> None:
    for message in gloo.run(len(digests), agree, digests):
        assert words in message
        if words != "agreed":
            for rank, digest in enumerate(digests):
                assert f"rank {rank} has the plan of batch 3, digest {digest}" in message

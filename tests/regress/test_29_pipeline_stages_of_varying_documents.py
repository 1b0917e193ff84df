"""Pipeline stages deadlock or misread when micro-batches differ in their documents; middle ones get cu_seqlens alone.

https://github.com/NVIDIA/Megatron-LM/issues/5100, https://github.com/NVIDIA/Megatron-LM/issues/620
"""

from __future__ import annotations

from typing import Any

import pytest
from fcp_runs import EOD, INDEX, LAYOUTS, Runs, fcp

from megatron_fcp.testing.loop import compare

pytestmark = pytest.mark.megatron

FOUR = {"num_layers": 4}
# Four chunks of one layer on two stages: the second and third chunk are neither first nor last.
CHUNKS = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}


def watch_documents() -> None:
    """Runs in the ranks: notes, for every chunk of the model and micro-batch, the documents and the tokens held."""
    from megatron.core.models.gpt import GPTModel

    from megatron_fcp.testing.loop_rank import note

    seen: list[tuple[bool, bool, int, int]] = []
    note("seen", seen)
    forward: Any = GPTModel.forward

    def watched(self: Any, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        held: Any = packed_seq_params.fcp_layout
        chunk = (self.pre_process, self.post_process)
        seen.append((*chunk, len(set(held.boundaries.offsets.tolist())) - 1, held.index.size))
        return forward(self, *args, packed_seq_params=packed_seq_params, **kwargs)

    GPTModel.forward = watched


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_of_other_documents(runs: Runs, layout: str) -> None:
    before = ("test_29_pipeline_stages_of_varying_documents:watch_documents",)
    result = runs(4, FOUR, **fcp(layout), **CHUNKS, **INDEX, before=before)
    difference = compare(result, runs(model=FOUR, **EOD))
    assert difference.loss < 1e-5
    assert difference.gradient < 1e-5, difference.name
    documents: dict[tuple[bool, bool], list[int]] = {}
    for rank in result.ranks:
        for first, last, count, tokens in rank.notes["seen"]:
            documents.setdefault((first, last), []).append(count)
            assert tokens == 64  # what stages send each other has one shape, whatever the documents
    assert set(documents) == {(True, False), (False, False), (False, True)}
    start, middle, end = documents[True, False], documents[False, False], documents[False, True]
    assert len(set(start)) >= 3  # micro-batches in flight hold different numbers of documents
    assert sorted(middle) == sorted(start + end)  # two middle chunks, and each was told of every micro-batch

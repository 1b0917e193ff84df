"""A key of the batch is absent, None or degenerate, and what reads it fails or cuts the wrong thing.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4354, https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4519
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fcp.testing.loop import TrainingLoop

pytestmark = pytest.mark.megatron

SEQUENCE = ("tokens", "labels", "loss_mask", "position_ids")
OTHERS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
STATES = ("absent", "None", "degenerate")
CASES = [(key, state) for key in (*SEQUENCE, *OTHERS) for state in STATES]


def degenerate(key: str) -> Any:
    """A value that carries nothing: one element, or a sequence of the same shape with one value throughout."""
    import torch

    shape = (2, 24) if key in SEQUENCE else (1,)
    return None if key == "hybrid_cp_group" else torch.zeros(shape, dtype=torch.int32)


def shares(cases: list[tuple[str, str]]) -> list[dict[str, list[Any]]]:
    """Runs in a rank: what two ranks keep of each case's batch, in both layouts, as plain lists."""
    import torch

    import megatron_fcp
    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration.settings import Settings
    from megatron_fcp.testing.lone_rank import begin_alone

    megatron_fcp.register()
    torch.distributed.get_rank = lambda group: group.rank()  # as Megatron's own cut of whole samples asks
    torch.distributed.get_world_size = lambda group: group.size()
    from megatron.core.utils import get_batch_on_this_cp_rank

    def share(key: str, state: str, layout: Any, rank: int) -> dict[str, Any]:
        config = FcpConfig(block_size=4, layout=layout)
        group = begin_alone(Settings(config, 2, 24, "packed", "sequence", True), rank)
        stream = torch.arange(48).view(2, 24)
        batch: dict[str, Any] = dict.fromkeys(OTHERS)
        batch.update(tokens=stream, labels=stream + 100, loss_mask=stream.float() + 200, position_ids=stream + 300)
        batch["cu_seqlens"] = torch.tensor([[0, 7, 7, 30, 48]], dtype=torch.int32)
        batch["max_seqlen"] = torch.tensor([23])
        if state == "absent":
            batch.pop(key, None)
        else:
            batch[key] = None if state == "None" else degenerate(key)
        kept = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        return {name: None if kept.get(name) is None else kept[name].tolist() for name in (*SEQUENCE, "attention_mask")}

    def both(key: str, state: str) -> dict[str, list[Any]]:
        found = [share(key, state, layout, rank) for layout in ("resident", "reshuffle") for rank in (0, 1)]
        return {name: [each[name] for each in found] for name in found[0]}

    return [both(key, state) for key, state in cases]


@pytest.fixture(scope="module")
def found(training_loop: TrainingLoop) -> list[dict[str, list[Any]]]:
    """Shares of every case, and last of a batch that has everything."""
    # Boundaries of one element describe no batch; that is a case of its own below.
    served = [case for case in CASES if case not in {("cu_seqlens", "degenerate"), ("cu_seqlens_padded", "degenerate")}]
    shared = training_loop.call("test_06_batch_keys_missing:shares", [*served, ("local_cp_size", "None")])
    return [*({"case": list(case), **values} for case, values in zip(served, shared, strict=False)), shared[-1]]


def test_other_keys_do_not_change(found: list[dict[str, list[Any]]]) -> None:
    *cases, whole = found
    assert len(cases) == 3 * 10 - 2
    for rows in zip(*(whole["tokens"][2 * layout : 2 * layout + 2] for layout in (0, 1)), strict=True):
        assert all(len(row) == 2 for row in rows)  # two samples, 12 tokens of each on a rank
    for layout in (0, 1):
        held = [token for rank in (0, 1) for row in whole["tokens"][2 * layout + rank] for token in row]
        assert sorted(held) == list(range(48))
    for case in cases:
        key, state = case["case"]
        for name in SEQUENCE:
            if name != key and key != "cu_seqlens":
                assert case[name] == whole[name], (key, state, name)
        assert case["attention_mask"] == [None] * 4  # plans replace masks
        if key in SEQUENCE:
            assert (case[key] == [None] * 4) == (state != "degenerate"), (key, state)
            if state == "degenerate":
                assert case[key] == [[[0] * 12] * 2] * 4


def test_without_boundaries_samples_are_documents(found: list[dict[str, list[Any]]]) -> None:
    cases = [case for case in found[:-1] if case["case"][0] == "cu_seqlens"]
    assert len(cases) == 2
    for case in cases:
        resident, outside = case["tokens"][:2], case["tokens"][2:]
        assert sorted(token for rank in resident for row in rank for token in row) == list(range(48))
        for sample in (0, 1):  # Megatron's own cut keeps each in its row
            held = sorted(token for rank in outside for token in rank[sample])
            assert held == list(range(24 * sample, 24 * sample + 24))


def nothing_to_cut(_: None) -> list[Any]:
    """Runs in a rank: batches of boundaries alone, and of boundaries that describe nothing."""
    import torch

    from megatron_fcp.integration.layouts import Boundaries

    said: list[Any] = []
    for offsets in (torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32), torch.tensor([5, 48])):
        try:
            said.append(Boundaries.of_packed(offsets, 24).num_tokens)
        except ValueError as error:
            said.append(str(error))
    return said


def test_degenerate_boundaries(training_loop: TrainingLoop) -> None:
    one, none, late = training_loop.call("test_06_batch_keys_missing:nothing_to_cut", None)
    assert one == 0  # a stream of no tokens: any batch that comes with it is refused for its length
    assert "must begin with 0" in none
    assert "must begin with 0" in late

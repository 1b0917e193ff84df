"""RoPE positions derived from the context-parallel rank: wrong under any layout but the one they were written for.

https://github.com/NVIDIA/Megatron-LM/pull/5243 (documents of 4 and 4 tokens at cp 2 take each other's positions),
https://github.com/NVIDIA/Megatron-LM/issues/6821
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fcp.testing.loop import TrainingLoop

pytestmark = pytest.mark.megatron

CASES = {
    "resident, whole samples": {"layout": "resident", "offsets": None},
    "resident, documents": {"layout": "resident", "offsets": [0, 1, 5, 5, 24, 31, 48]},
    "reshuffle, documents": {"layout": "reshuffle", "offsets": [0, 1, 5, 5, 24, 31, 48]},
    "reshuffle, padded documents": {"layout": "reshuffle", "offsets": [0, 12, 12, 24, 48], "sharding": "document"},
    "reported, stream cut": {"layout": "reshuffle", "offsets": [0, 4, 8], "seq_length": 8},
    "reported, documents cut": {"layout": "reshuffle", "offsets": [0, 4, 8], "seq_length": 8, "sharding": "document"},
}
KINDS = ("plain", "half of the channels", "Llama 3", "YaRN")
DEFAULTS = {"seq_length": 24, "sharding": "sequence", "kinds": KINDS}


def _module(kind: str, group: Any) -> tuple[Any, int]:
    """The embedding, and its channels."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    if kind == "YaRN":
        small = {"original_max_position_embeddings": 96}  # the constructor cuts it into 2 * cp_size chunks
        return YarnRotaryEmbedding(16, use_cpu_initialization=True, cp_group=group, **small), 16
    options = {"half of the channels": {"rotary_percent": 0.5}, "Llama 3": {"rope_scaling": True}}.get(kind, {})
    whole = {"rotary_percent": 1.0, "use_cpu_initialization": True, "cp_group": group}
    return RotaryEmbedding(16, **{**whole, **options}), 16


def all_rotations(options: list[dict[str, Any]]) -> list[dict[str, list[list[Any]]]]:
    """Runs in a rank: :func:`rotations` of all cases."""
    from megatron_fcp.integration import register

    register()
    return [rotations(case) for case in options]


def rotations(options: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """For every kind and rank: whether rope(dispatch(x)) is dispatch(rope(x)), its tokens, and their positions."""
    import torch
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration import session
    from megatron_fcp.integration.layouts import Boundaries
    from megatron_fcp.integration.settings import Settings

    cp_size, seq_length, offsets = options["cp_size"], options["seq_length"], options["offsets"]
    documents = "none" if offsets is None else "packed"
    config = FcpConfig(block_size=2, layout=options["layout"])
    run = session.begin(Settings(config, cp_size, seq_length, documents, options["sharding"], True))  # type: ignore[arg-type]
    if offsets is None:
        boundaries, samples = Boundaries.of_samples(2, seq_length), 2
        place = torch.arange(seq_length).repeat(2)
    else:
        boundaries = Boundaries.of_packed(torch.tensor(offsets), seq_length)
        samples = boundaries.num_tokens // seq_length
        place = torch.cat([torch.arange(n) for n in torch.tensor(offsets).diff()])
    rope = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, sequence_parallel=False, tensor_model_parallel_size=1,
        context_parallel_size=cp_size, mrope_section=None,
    )  # fmt: skip

    def rotate(x: Any, embedding: Any) -> Any:
        frequencies, *factor = embedding if isinstance(embedding, tuple) else (embedding,)
        nobody = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # only cu_seqlens would make it look at the rank
        mscale = factor[0] if factor else 1.0
        return apply_rotary_pos_emb(x, frequencies, config=rope, mscale=mscale, cp_group=nobody)

    result: dict[str, list[list[Any]]] = {}
    for kind in options["kinds"]:
        result[kind] = []
        for rank in range(cp_size):
            group = SimpleNamespace(rank=lambda r=rank: r, size=lambda: cp_size)
            module, channels = _module(kind, group)
            x = torch.randn(place.numel(), 1, 3, channels, generator=torch.Generator().manual_seed(0))
            table = module.get_emb(int(place.max()) + 1)
            table, *factor = table if isinstance(table, tuple) else (table,)
            whole = rotate(x, (table[place], *factor) if factor else table[place])
            layout = run.layouts.get(boundaries, rank)
            index = torch.from_numpy(layout.index.copy())
            held = x[index].view(-1, samples, 3, channels)
            packed = None if offsets is None else SimpleNamespace(fcp_layout=layout)
            length = module.get_rotary_seq_len(None, SimpleNamespace(input_tensor=None), held, rope, packed)
            got = rotate(held, module(length))
            same = torch.equal(got.reshape(-1, 3, channels), whole[index].view(-1, 3, channels))
            result[kind].append([same, index.tolist(), length.positions.reshape(-1).tolist()])
    return result


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_rotating_and_dispatching_commute(training_loop: TrainingLoop, cp_size: int) -> None:
    cases = [case for case in CASES if cp_size < 3 or "reported" not in case]  # its documents are for two ranks
    options = [{**DEFAULTS, "cp_size": cp_size, **CASES[case]} for case in cases]
    results = training_loop.call("test_08_positions_from_the_rank:all_rotations", options)
    for case, result in zip(cases, results, strict=True):
        assert tuple(result) == KINDS
        for kind, ranks in result.items():
            held = sorted(token for _, index, _ in ranks for token in index)
            assert held == list(range(len(held)))
            for rank, (same, _, _) in enumerate(ranks):
                assert same, (case, kind, rank)


def test_the_reported_positions(training_loop: TrainingLoop) -> None:
    """Rank 0 holds tokens 0, 3, 4 and 7 of two documents of 4: places 0, 3, 0 and 3."""
    options = {**DEFAULTS, "cp_size": 2, "kinds": ("plain",), **CASES["reported, documents cut"]}
    (ranks,) = training_loop.call("test_08_positions_from_the_rank:all_rotations", [options])[0].values()
    assert [[index, positions] for _, index, positions in ranks] == [
        [[0, 3, 4, 7], [0, 3, 0, 3]],
        [[1, 2, 5, 6], [1, 2, 1, 2]],
    ]

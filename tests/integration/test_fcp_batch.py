"""The data path by itself: boundaries, the tokens of a rank, their positions, and what ranks compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_fcp.testing.corpus import EOD_TOKEN
from megatron_fcp.testing.loop import TrainingLoop

pytestmark = pytest.mark.megatron


def boundaries_and_masks(seed: int) -> list[tuple[list[int], list[int]]]:
    """Runs in a rank: offsets by FCP, and those that Megatron's own attention mask implies."""
    import torch
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    from megatron_fcp.integration.batch import add_boundaries

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, EOD_TOKEN + 1, (40, 24), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.1] = EOD_TOKEN
    tokens[0], tokens[1], tokens[2, -1], tokens[3, 0] = EOD_TOKEN, 7, EOD_TOKEN, EOD_TOKEN
    batch: dict[str, Any] = {"tokens": tokens}
    add_boundaries(batch, EOD_TOKEN)
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == torch.int32
    assert batch["cu_seqlens"].shape == (40, 25)
    found = []
    for row, offsets, longest in zip(tokens, batch["cu_seqlens"], batch["max_seqlen"], strict=True):
        masked, _, _ = _get_ltor_masks_and_position_ids(row, EOD_TOKEN, False, True, False, True)
        first_seen = (~masked[0]).int().argmax(dim=1)  # each token attends from its document's first token on
        starts = torch.unique(first_seen).tolist()
        assert longest == int(offsets.diff().max())
        found.append((sorted({*offsets.tolist()}), [*starts, 24]))
    return found


def test_boundaries_are_those_of_megatrons_mask(training_loop: TrainingLoop) -> None:
    for offsets, expected in training_loop.call("test_fcp_batch:boundaries_and_masks", 1):
        assert offsets == expected


def dispatch(options: dict[str, Any]) -> dict[str, Any]:
    """Runs in a rank: every rank's part of a numbered stream, its positions, and their rotary embedding."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration import register
    from megatron_fcp.integration.batch import take_tokens
    from megatron_fcp.integration.layouts import Boundaries, Layout
    from megatron_fcp.integration.rotary import PositionedLength
    from megatron_fcp.integration.settings import Settings

    register()
    cp_size, samples, seq_length = options["cp_size"], options["samples"], options["seq_length"]
    config = FcpConfig(block_size=4, layout=options["layout"])
    settings = Settings(config, cp_size, seq_length, options["documents"], options["sharding"], True)
    if options["offsets"] is None:
        boundaries = Boundaries.of_samples(samples, seq_length)
        whole = torch.arange(seq_length).repeat(samples)
    else:
        offsets = torch.tensor(options["offsets"])
        boundaries = Boundaries.of_packed(offsets, seq_length)
        whole = torch.cat([torch.arange(n) for n in offsets.diff()])
    rope = RotaryEmbedding(16, 1.0, use_cpu_initialization=True)
    stream = torch.arange(samples * seq_length).view(samples, seq_length)
    result: dict[str, Any] = {"tokens": [], "rope": []}
    for rank in range(cp_size):
        layout = Layout(boundaries, settings, rank)
        batch = take_tokens({"tokens": stream, "labels": None}, layout, seq_length)
        held = batch["tokens"].t().reshape(-1)  # as a [sequence, batch] activation holds them
        result["tokens"].append(batch["tokens"].numpy())
        length = PositionedLength.of(seq_length, layout.positions_on(torch.device("cpu")).view(-1, samples))
        embedding = rope(length)
        assert embedding.shape == (held.numel() // samples, samples, 1, 16)
        here = embedding.reshape(held.numel(), 16)
        result["rope"].append(torch.equal(here, rope.get_emb(seq_length)[:, 0, 0][whole[held]]))
    return result


CASES = {
    "resident, one document per sample": {"layout": "resident", "offsets": None},
    "resident, documents": {"layout": "resident", "offsets": [0, 1, 5, 5, 24, 31, 48]},
    "reshuffle, documents": {"layout": "reshuffle", "offsets": [0, 1, 5, 5, 24, 31, 48]},
    "reshuffle, padded documents": {"layout": "reshuffle", "offsets": [0, 12, 12, 24, 48], "sharding": "document"},
}


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_dispatch_keeps_every_token_and_its_position(training_loop: TrainingLoop, case: str, cp_size: int) -> None:
    options = {"cp_size": cp_size, "samples": 2, "seq_length": 24, "documents": "packed", "sharding": "sequence"}
    result = training_loop.call("test_fcp_batch:dispatch", {**options, **CASES[case]})
    assert all(tokens.shape == (2, 24 // cp_size) for tokens in result["tokens"])
    np.testing.assert_array_equal(np.sort(np.concatenate(result["tokens"], axis=None)), np.arange(48))
    assert all(result["rope"])  # rope(dispatch(x)) == dispatch(rope(x)), bit for bit


def fingerprints(_: None) -> list[int]:
    """Runs in a rank: fingerprints of batches that differ a little."""
    import torch

    from megatron_fcp.integration.batch import fingerprint

    tokens = torch.arange(64).view(2, 32)
    swapped, changed, shifted = tokens.clone(), tokens.clone(), tokens.roll(1)
    swapped[0, 3], swapped[0, 4] = tokens[0, 4].item(), tokens[0, 3].item()
    changed[1, 31] += 1
    mask = torch.ones(64)
    fewer = mask.clone()
    fewer[5] = 0
    values = (tokens, swapped, changed, shifted, torch.zeros_like(tokens), mask, fewer)
    return [int(fingerprint(v)) for v in values] + [int(fingerprint(tokens.clone()))]


def test_fingerprints_tell_batches_apart(training_loop: TrainingLoop) -> None:
    *distinct, again = training_loop.call("test_fcp_batch:fingerprints", None)
    assert len({*distinct}) == len(distinct)
    assert again == distinct[0]


def bad_batches(_: None) -> list[str]:
    """Runs in a rank: what is said about batches that contradict themselves."""
    import torch

    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration.batch import take_tokens
    from megatron_fcp.integration.layouts import Boundaries, Layout
    from megatron_fcp.integration.settings import Settings

    def message(config: FcpConfig, cp_size: int, sharding: Any, offsets: list[int], tokens: int) -> str:
        settings = Settings(config, cp_size, 24, "packed", sharding, True)
        try:
            layout = Layout(Boundaries.of_packed(torch.tensor(offsets), 24), settings, 0)
            take_tokens({"tokens": torch.arange(tokens)[None]}, layout, 24)
        except ValueError as error:
            return str(error)
        return "accepted"

    resident, outside = FcpConfig(layout="resident"), FcpConfig()
    return [
        message(resident, 5, "sequence", [0, 24], 24),
        message(resident, 2, "sequence", [0, 20, 10, 24], 24),
        message(resident, 2, "sequence", [0, 24], 48),
        message(outside, 2, "document", [0, 9, 24], 24),
        message(resident, 2, "sequence", [3, 24], 24),
    ]


def test_batches_that_contradict_themselves_are_refused(training_loop: TrainingLoop) -> None:
    uneven, falling, longer, odd, late = training_loop.call("test_fcp_batch:bad_batches", None)
    assert "--seq-length 24" in uneven
    assert "--context-parallel-size 5" in uneven
    assert "negative" in falling
    assert "48 tokens" in longer
    assert "24" in longer
    assert "document 0 holds 9 tokens" in odd
    assert "begin with 0" in late


def kept(layout_name: str) -> list[Any]:
    """Runs in a rank: whether a layout that the cache keeps still holds its plan, and what layers get of it."""
    import gc
    import weakref

    import torch

    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration.layouts import Boundaries, LayoutCache
    from megatron_fcp.integration.settings import Settings

    config = FcpConfig(block_size=4, layout=layout_name)  # type: ignore[arg-type]
    plans: list[Any] = []
    cache = LayoutCache(
        Settings(config, 2, 24, "packed", "sequence", True, windows=(None, 5)),
        on_new=lambda plan: plans.append(weakref.ref(plan)),
    )
    layout = cache.get(Boundaries.of_packed(torch.tensor([0, 1, 5, 5, 24, 31, 48]), 24), 1)
    gc.collect()
    host = torch.device("cpu")
    calls = [len(layout.compiled(host, window).calls) > 0 for window in (None, 5)]
    moves = layout_name == "resident" or layout.route(host).route.num_source == 24
    return [len(plans), plans[0]() is None, *calls, moves]


@pytest.mark.parametrize("layout", ["resident", "reshuffle"])
def test_a_kept_layout_holds_one_ranks_part_of_the_plan(training_loop: TrainingLoop, layout: str) -> None:
    """Of 128 ranks with 8,192 tokens each, plans took about 5 MB and a rank's part 0.6; a rank keeps 32 layouts."""
    assert training_loop.call("test_fcp_batch:kept", layout) == [1, True, True, True, True]

"""Hooks: nothing at import, all or nothing, put back as it was, and only on the Megatron they were made for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fcp_runs import fcp

from megatron_fcp.testing.loop import TrainingJob, TrainingLoop, tiny_model_args
from megatron_fcp.testing.pool import JobError

pytestmark = pytest.mark.megatron


def test_import_leaves_megatron_and_torch_alone() -> None:
    code = "import sys, megatron_fcp; print(any(m.partition('.')[0] in ('torch', 'megatron') for m in sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def _values() -> dict[str, Any]:
    from megatron_fcp.integration.hooks import places

    return {seam.name: vars(owner)[seam.attribute.rpartition(".")[2]] for seam, owner, _ in places()}


def install_and_remove(_: None) -> dict[str, Any]:
    """Runs in a rank: what is where before, during and after."""
    import types

    from megatron.core import utils

    import megatron_fcp
    import megatron_fcp.integration as integration
    from megatron_fcp.integration.releases import SOME_RELEASES
    from megatron_fcp.integration.seams import SEAMS

    script = types.ModuleType("a_users_script")  # has imported Megatron's function before register()
    script.slice_batch = utils.get_batch_on_this_cp_rank  # type: ignore[attr-defined]
    sys.modules[script.__name__] = script
    before = _values()
    megatron_fcp.register()
    during = _values()
    late = types.ModuleType("a_later_script")
    late.slice_batch = utils.get_batch_on_this_cp_rank  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    reached = script.slice_batch is during["megatron.core.utils.get_batch_on_this_cp_rank"]
    try:
        megatron_fcp.register()
        twice = "accepted"
    except RuntimeError as error:
        twice = str(error)
    integration.unregister()
    after = _values()
    try:
        integration.unregister()
        gone = "accepted"
    except RuntimeError as error:
        gone = str(error)
    original = before["megatron.core.utils.get_batch_on_this_cp_rank"]
    return {
        "replaced": {name for name in before if before[name] is not during[name]},
        "expected": {seam.name for seam in (*SEAMS, *SOME_RELEASES) if seam.wrap and seam.name in before},
        "restored": all(before[name] is after[name] for name in before),
        "script reached": reached,
        "scripts restored": script.slice_batch is original and late.slice_batch is original,
        "twice": twice,
        "gone": gone,
    }


def test_hooks_go_in_once_and_come_out_whole(training_loop: TrainingLoop) -> None:
    result = training_loop.call("test_fcp_hooks:install_and_remove", None)
    assert result["replaced"] == result["expected"]
    assert len(result["expected"]) >= 12
    assert result["restored"]
    assert result["script reached"]
    assert result["scripts restored"]
    assert "registered already" in result["twice"]
    assert "not registered" in result["gone"]


def other_megatron(change: str) -> tuple[str, bool]:
    """Runs in a rank: what register() says to a Megatron that is not the expected one, and whether it left it alone."""
    from megatron.core import package_info, packed_seq_params, utils
    from megatron.core.transformer.attention import Attention

    import megatron_fcp
    from megatron_fcp.integration import is_registered

    if change in ("version", "version and parameters"):
        package_info.VERSION = (0, 21, 0, "rc1")
    if change == "version":
        pass
    elif change.endswith("parameters"):
        original = utils.get_batch_on_this_cp_rank
        utils.get_batch_on_this_cp_rank = lambda batch, group=None: original(batch, False, group)
    elif change == "missing":
        del packed_seq_params.PackedSeqParams.__post_init__
    else:
        Attention.forward = Attention.forward  # the text below is what inspect finds
        from megatron_fcp.integration import hooks

        hooks.inspect.getsource = lambda value: "something else"  # type: ignore[assignment]
    kept = utils.get_batch_on_this_tp_rank
    with pytest.raises(RuntimeError) as caught:
        megatron_fcp.register()
    return str(caught.value), utils.get_batch_on_this_tp_rank is kept and not is_registered()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("version", ("0.21.0rc1", "0.16 to 0.20", "look familiar", "megatron-core>=0.16,<0.20")),
        ("version and parameters", ("0.21.0rc1", "megatron.core.utils.get_batch_on_this_cp_rank takes (batch, group)")),
        (
            "parameters",
            ("megatron.core.utils.get_batch_on_this_cp_rank", "0.19.", "(batch, group)", "2 forms of"),
        ),
        ("missing", ("PackedSeqParams.__post_init__", "0.19.", "is not there")),
        ("source", ("process_mtp_loss", "0.19.", "loss_mask, num_tokens = roll_tensor(")),
    ],
)
def test_other_megatrons_are_refused_by_name(training_loop: TrainingLoop, change: str, words: tuple[str, ...]) -> None:
    message, untouched = training_loop.call("test_fcp_hooks:other_megatron", change)
    assert untouched
    for word in words:
        assert word in message


def model_of_others(_: None) -> str:
    """Runs in a rank: the first batch of a model whose layers were built without FCP's attention."""
    import torch
    from megatron.core import parallel_state

    import megatron_fcp
    from megatron_fcp.config import FcpConfig
    from megatron_fcp.integration import session
    from megatron_fcp.integration.settings import Settings

    megatron_fcp.register()
    session.begin(Settings(FcpConfig(), 2, 8, "none", "sequence", True))
    parallel_state.set_pipeline_model_parallel_world_size(1)
    from megatron.core.utils import get_batch_on_this_cp_rank

    with pytest.raises(RuntimeError) as caught:
        get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 8)}, is_hybrid_cp=False)
    return str(caught.value)


def test_model_without_fcps_attention_is_noticed(training_loop: TrainingLoop) -> None:
    message = training_loop.call("test_fcp_hooks:model_of_others", None)
    assert "--context-parallel-backend fcp" in message
    assert "--spec" in message


def test_a_spec_with_another_attention_is_refused_on_every_stage(training_loop: TrainingLoop) -> None:
    """Where a stage has no batch of its own to look at, such a model trained, and learned from wrong attention."""
    flags = fcp("resident", pipeline_model_parallel_size=2, spec=("foreign_spec", "layer"))
    with pytest.raises(JobError) as failed:
        training_loop.run(TrainingJob(tiny_model_args(**flags), 4, grace=30))
    for rank in failed.value.ranks:
        assert "layer 1 was built with ForeignAttention" in rank.error or "layer 2 was built with" in rank.error
        assert "--spec" in rank.error

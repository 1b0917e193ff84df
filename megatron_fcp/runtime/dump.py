"""A rank's plan in words, for reports: its steps, with a mark at the one it is in."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fcp.plan.program import Compute, Exchange, Reduce, Step, Transfer
from megatron_fcp.runtime.transport import Position

MAX_LINES = 40


def describe_steps(position: Position) -> str:
    """Steps of the pass that a rank is in; those around its own where there are many, empty outside a pass.

    Examples
    --------
    >>> from megatron_fcp.plan.program import Segment
    >>> pull = Exchange("pull", 0, (Transfer(1, (Segment(0, 0, 2),)),), ())
    >>> print(describe_steps(Position("forward of attention", step=1, steps=(pull, Compute(0)))))
      1  pull round 0: send 2 tokens to rank 1
    > 2  attend to what is local
    """
    steps = position.steps
    first = max(0, min(position.step - MAX_LINES // 2, len(steps) - MAX_LINES))
    lines: list[str] = []
    for i in range(first, min(first + MAX_LINES, len(steps))):
        mark = ">" if i == position.step else " "
        lines.append(f"{mark} {i + 1:<2} {_describe(steps[i])}")
    if first:
        lines.insert(0, f"  ... {first} steps before")
    if first + MAX_LINES < len(steps):
        lines.append(f"  ... {len(steps) - first - MAX_LINES} steps after")
    return "\n".join(lines)


def _describe(step: Step) -> str:
    if isinstance(step, Exchange):
        parts = _transfers("send", "to", step.sends) + _transfers("receive", "from", step.recvs)
        return f"{step.kind} round {step.round}: {', '.join(parts)}"
    if isinstance(step, Compute):
        return f"attend to stage {step.stage}" if step.stage else "attend to what is local"
    if isinstance(step, Reduce):
        return f"add what push round {step.round} brought"
    return f"release the {step.kind} of stage {step.buffer}"


def _transfers(verb: str, preposition: str, transfers: Sequence[Transfer]) -> list[str]:
    return [f"{verb} {t.tokens} tokens {preposition} rank {t.peer}" for t in transfers]

"""Plans of a run, written down for `megatron-fcp view`, `simulate`, `trace` and `replay`."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_fcp.plan import Plan
from megatron_fcp.plan.planfile import write_plan

PLANS_SAVED = 64  # distinct plans; a picture of a run needs no more


class PlanRecorder:
    """Writes each new plan of the run's first rank to ``plan-NNNN-DIGEST.json.gz``, up to 64 of them.

    Parameters
    ----------
    folder : str
        Made if missing (``--fcp-save-plans``).

    Raises
    ------
    ValueError
        If the folder cannot be written to.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._seen: set[str] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--fcp-save-plans {folder} cannot be made a folder: {error}") from error
        if not os.access(self._folder, os.W_OK):
            raise ValueError(f"--fcp-save-plans {folder} is not writable; name a folder that is")

    def record(self, plan: Plan) -> None:
        """Write ``plan`` unless it was written before or the limit is reached."""
        if plan.digest in self._seen or len(self._seen) >= PLANS_SAVED:
            return
        write_plan(plan, self._folder / f"plan-{len(self._seen):04d}-{plan.digest[:12]}.json.gz")
        self._seen.add(plan.digest)

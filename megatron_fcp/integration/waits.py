"""How long training waited for plans, counted on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlanWaits:
    """What the training thread found when it asked for a layout.

    Attributes
    ----------
    ready : int
        It had been made ahead of need.
    waited : int
        It was being made, and training waited for the rest.
    planned : int
        Nobody had begun: the training thread made it.
    repeated : int
        It had been used before.
    seconds : float
        Time of the training thread from asking to having, all calls together.
    told : float
        Seconds up to the last log line.
    """

    ready: int = 0
    waited: int = 0
    planned: int = 0
    repeated: int = 0
    seconds: float = 0.0
    told: float = 0.0

    def since_last(self, reset: bool) -> float:
        """Seconds since the last call with ``reset``."""
        seconds = self.seconds - self.told
        if reset:
            self.told = self.seconds
        return seconds

    def __str__(self) -> str:
        return (
            f"{self.ready} plans were ready when training asked for them, {self.waited} had to be waited for, "
            f"{self.planned} were made by the training thread; all this took it {self.seconds * 1e3:.1f} ms"
        )

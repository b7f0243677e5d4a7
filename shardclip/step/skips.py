"""Counts skipped steps, on the device where they are decided there."""

from torch import Tensor

from shardclip.compat import HostCopy, is_capturing
from shardclip.errors import NonFiniteGradientError


class Skips:
    """How many steps were skipped, in all and in a row."""

    def __init__(self, total: int = 0, streak: int = 0) -> None:
        self.total: int | Tensor = total
        self.streak: int | Tensor = streak
        self._told: HostCopy | None = None

    def count(self, skipped: bool | Tensor) -> None:
        """Count a step."""
        self.total = self.total + skipped
        self.streak = (self.streak + 1) * skipped
        self._told = None
        if isinstance(self.streak, Tensor) and not is_capturing():
            self._told = HostCopy(self.streak)

    def raise_beyond(self, most: int | None) -> None:
        """Raise if too many were skipped in a row; alike on all ranks, since all skip alike.

        What was decided on a device is waited for in the next call: no host sync.

        Raises:
            NonFiniteGradientError: Says how many, and what to look at.
        """
        if most is None:
            return
        streak = int(self.streak if self._told is None else self._told.read())
        if streak >= most:
            self.streak, self._told = 0, None  # whoever goes on has mended something
            raise NonFiniteGradientError(
                f"{streak} steps in a row were skipped, as gradients were not finite "
                f"(or spikes, with a threshold that skips those); "
                f"max_consecutive_skips={most}. The parameters have not changed since: look at the "
                "data, the learning rate and the loss scale (ClipResult.nonfinite names the "
                "gradients), or load an earlier checkpoint"
            )

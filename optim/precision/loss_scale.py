"""Loss scaling for fp16: large enough that small gradients survive, small enough that large ones do not overflow.

The rules are those of ``torch.amp.GradScaler`` (growth after a number of good steps, backoff after an overflow) with
DeepSpeed's hysteresis: the last of that many overflows lowers the scale. Hysteresis 1 is torch's rule.
Mixed precision training: Micikevicius et al., arXiv:1710.03740.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from nvme_offload.offload.config.training import Fp16Config

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
_MAX_SCALE = 2.0**127
"""Largest power of two in fp32; beyond it the scaled loss itself would overflow."""
_MIN_SCALE = 2.0**-126
"""Least power of two whose inverse is finite in fp32, and which is a normal number itself."""


@dataclass
class LossScaler:
    """Decides the loss scale of the next step from what happened in this one."""

    loss_scale: float
    dynamic: bool
    growth_interval: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: float
    good_steps: int = 0
    """Steps without an overflow since the latest overflow or growth."""
    overflows_left: int = 0
    """Overflows until the scale halves; 0 means `hysteresis`."""

    @classmethod
    def of(cls, section: Fp16Config) -> Self:
        """Return the scaler that the keys of the ``fp16`` section describe."""
        dynamic = section.loss_scale == 0
        return cls(
            loss_scale=2.0**section.initial_scale_power if dynamic else section.loss_scale,
            dynamic=dynamic,
            growth_interval=section.loss_scale_window,
            hysteresis=section.hysteresis,
            consecutive_hysteresis=section.consecutive_hysteresis,
            min_loss_scale=section.min_loss_scale,
        )

    def __post_init__(self) -> None:
        self.overflows_left = self.overflows_left or self.hysteresis

    def update(self, *, found_inf: bool) -> None:
        """Take note of a step: skipped because a gradient was not finite, or taken."""
        if not self.dynamic:
            return
        if found_inf:
            self.good_steps = 0
            if self.overflows_left > 1:
                self.overflows_left -= 1
            else:
                self.loss_scale = max(self.loss_scale * BACKOFF_FACTOR, self.min_loss_scale, _MIN_SCALE)
            return
        if self.consecutive_hysteresis:
            self.overflows_left = self.hysteresis
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.overflows_left = self.hysteresis
            self.loss_scale = min(self.loss_scale * GROWTH_FACTOR, _MAX_SCALE)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the scaler knows, as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for item in fields(self):
            setattr(self, item.name, state[item.name])

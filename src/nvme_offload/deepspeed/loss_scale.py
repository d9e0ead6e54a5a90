"""DeepSpeed's dynamic loss scale: it doubles after one good step more than `LossScaler` waits for."""

from typing import Self

from nvme_offload.offload.config.training import Fp16Config
from nvme_offload.optim.precision.loss_scale import LossScaler


class DynamicLossScaler(LossScaler):
    """A `LossScaler` whose first good step, and whose first after an overflow, is not counted; DeepSpeed's names."""

    cur_iter = 0
    """Steps since it was made."""

    @classmethod
    def of_stage(cls, section: Fp16Config, stage: int) -> Self:
        """Return the scaler that the keys of the ``fp16`` section describe; DeepSpeed's stage 0 has no hysteresis."""
        made = cls.of(section if stage else section.model_copy(update={"hysteresis": 1}))
        made.good_steps = -1
        return made

    def update(self, *, found_inf: bool) -> None:
        """Take note of a step: skipped because a gradient was not finite, or taken."""
        super().update(found_inf=found_inf)
        self.cur_iter += 1
        if found_inf:
            self.good_steps = -1

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether it changes."""
        return self.dynamic

    @property
    def scale_window(self) -> int:
        """Good steps after which the scale doubles."""
        return self.growth_interval

    @property
    def min_scale(self) -> float:
        """The least loss scale."""
        return self.min_loss_scale

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until the scale halves."""
        return self.overflows_left

    @property
    def delayed_shift(self) -> int:
        """Overflows until the scale halves, at the beginning."""
        return self.hysteresis

"""An engine's optimizer under the names of DeepSpeed's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nvme_offload.deepspeed.refusal import PAGE
from nvme_offload.optim.optimizer import OffloadOptimizer


class DeepSpeedNames:
    """Names that scripts ask DeepSpeed's optimizers for, beside torch's own. The engine's optimizer has them."""

    engine: Callable[[], Any]

    @property
    def loss_scaler(self) -> Any:
        """The scale of the loss, and what it follows; without fp16 it is 1 and stays."""
        none = SimpleNamespace(cur_scale=1.0, loss_scale=1.0, dynamic=False, dynamic_loss_scale=False)
        engine = self.engine()
        return none if engine is None else engine.engine.loss_scaler or none

    scaler = loss_scale_config = loss_scaler

    @property
    def cur_scale(self) -> float:
        """The factor of the loss; 1 without fp16."""
        return float(self.loss_scaler.cur_scale)

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return bool(self.loss_scaler.dynamic)

    def needs_scaler(self) -> bool:
        """Whether a loss is scaled before its backward: under fp16."""
        engine = self.engine()
        return engine is not None and engine.engine.loss_scaler is not None

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped."""
        engine = self.engine()
        return engine is not None and engine.latest_was_skipped

    @property
    def _global_grad_norm(self) -> float:
        return float(self.total_norm)

    @property
    def optimizer(self) -> Any:
        """The optimizer inside DeepSpeed's: here it is the same."""
        return self

    def __getattr__(self, name: str) -> Any:
        what = "neither torch's optimizers nor those here have it"
        raise AttributeError(
            f"optimizer.{name} is not there: {what}, and if DeepSpeed's do, it is not done here: {PAGE}",
            name=name,
            obj=self,
        )


def as_deepspeeds(engine: Any) -> OffloadOptimizer:
    """Give the optimizer of a `DeepSpeedEngine` `DeepSpeedNames`; return it."""
    made: OffloadOptimizer = engine.engine.optimizer
    kind = type(made)
    about = {"__module__": kind.__module__, "__doc__": kind.__doc__, "engine": weakref.ref(engine)}
    made.__class__ = type(kind.__name__, (DeepSpeedNames, kind), about)
    return made

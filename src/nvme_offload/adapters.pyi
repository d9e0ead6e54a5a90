"""The public names of adapters: type checkers read them here, and so does `adapters.py`."""

from nvme_offload.optim.adapters.engine_trainer import OffloadTrainer
from nvme_offload.optim.adapters.lightning import OffloadLightningCallback
from nvme_offload.optim.adapters.trainer import OffloadTrainerCallback, trainer_optimizer

__all__ = ["OffloadLightningCallback", "OffloadTrainer", "OffloadTrainerCallback", "trainer_optimizer"]

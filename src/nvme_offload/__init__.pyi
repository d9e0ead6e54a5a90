"""The public names: type checkers read them here, and so does `__init__.py`, which imports each when it is used."""

from nvme_offload.adapters import OffloadLightningCallback as OffloadLightningCallback
from nvme_offload.adapters import OffloadTrainer as OffloadTrainer
from nvme_offload.adapters import OffloadTrainerCallback as OffloadTrainerCallback
from nvme_offload.adapters import trainer_optimizer as trainer_optimizer
from nvme_offload.aio_native.engine import EngineUnavailable
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.offload.activations.activation_swapper import ActivationSwapper
from nvme_offload.offload.activations.kept import ActivationStats
from nvme_offload.offload.config import OffloadConfig
from nvme_offload.offload.errors import (
    BlockOrderError,
    CheckpointError,
    CheckpointWriteError,
    ClosedError,
    ConfigError,
    ConfigWarning,
    CorruptionError,
    EngineLostError,
    ExistsError,
    ForeignFolderError,
    ForkError,
    HalfRenamedError,
    MissingError,
    OffloadError,
    OutOfSpaceError,
    PeerError,
    RemovedError,
    ResumeError,
    StateError,
    SwapIOError,
    WeightFileError,
    WeightsError,
)
from nvme_offload.offload.storage.transfer import Transfer
from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper
from nvme_offload.offload.weights.patch import WeightChange, WeightPatch, apply_patch, save_patch
from nvme_offload.offload.weights.writer import weight_items, write_sharded
from nvme_offload.optim.access.full_values import (
    get_full_grad,
    get_full_optimizer_state,
    get_full_param,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
)
from nvme_offload.optim.named_optimizers import (
    OffloadAdagrad,
    OffloadAdam,
    OffloadAdamW,
    OffloadLion,
    OffloadMuon,
    OffloadSGD,
)
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.rules.rule import State, UpdateRule, check_numbers, rounded
from nvme_offload.optim.telemetry.stats import (
    OptimizerStats,
    Span,
)
from nvme_offload.optim.telemetry.trace import write_trace
from nvme_offload.optim.tiers.parts import split_parameters
from nvme_offload.optim.zero.engine import OffloadEngine
from nvme_offload.optim.zero.initialize import initialize

__version__: str

__all__ = [
    "ActivationStats",
    "ActivationSwapper",
    "BlockOrderError",
    "CheckpointError",
    "CheckpointWriteError",
    "ClosedError",
    "ConfigError",
    "ConfigWarning",
    "CorruptionError",
    "EngineLostError",
    "EngineUnavailable",
    "ExistsError",
    "FaultSpec",
    "ForeignFolderError",
    "ForkError",
    "HalfRenamedError",
    "MissingError",
    "OffloadAdagrad",
    "OffloadAdam",
    "OffloadAdamW",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "OffloadLion",
    "OffloadMuon",
    "OffloadOptimizer",
    "OffloadSGD",
    "OptimizerStats",
    "OutOfSpaceError",
    "PeerError",
    "RemovedError",
    "ResumeError",
    "Span",
    "State",
    "StateError",
    "SwapIOError",
    "TensorSwapper",
    "Transfer",
    "UpdateRule",
    "WeightChange",
    "WeightFileError",
    "WeightPatch",
    "WeightsError",
    "apply_patch",
    "check_numbers",
    "get_full_grad",
    "get_full_optimizer_state",
    "get_full_param",
    "initialize",
    "rounded",
    "save_patch",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "split_parameters",
    "weight_items",
    "write_sharded",
    "write_trace",
]

"""What a case drives: each subject makes calls beside a model in memory that is always right."""

from collections.abc import Mapping
from typing import Any

from tests.support.simulator.subjects.gathers import GatherSubject
from tests.support.simulator.subjects.optimizer import OptimizerSubject
from tests.support.simulator.subjects.swapper import SwapperSubject
from tests.support.simulator.subjects.tier import TierSubject

SUBJECTS: Mapping[str, Any] = {
    "tier": TierSubject,
    "swapper": SwapperSubject,
    "optimizer": OptimizerSubject,
    "gathers": GatherSubject,
}

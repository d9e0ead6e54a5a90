"""From the name of an optimizer to its rule. The names are those of the section: `offload.config.optimizer`."""

from nvme_offload.offload.config.optimizer import OptimizerConfig
from .elementwise import SGD, Adagrad, Adam, AdamW, Lion
from .muon import Muon
from .rule import UpdateRule

RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (AdamW(), Adam(), Lion(), Adagrad(), Muon(), SGD())}


def rule_of(section: OptimizerConfig) -> UpdateRule:
    """Return the rule that the section asks for, with its hyperparameters."""
    return RULES[section.kind].of(section.hyperparameters)

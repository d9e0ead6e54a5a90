"""From the name of an optimizer to its rule. The names are those of the section: `offload.config.optimizer`."""

import importlib

from nvme_offload.offload.config.optimizer import OptimizerConfig
from nvme_offload.optim.rules.rule import UpdateRule


def rule_named(name: str) -> UpdateRule:
    """Return the rule called `name`, which is the class of that name in the module of that name, in lower case."""
    rule = getattr(importlib.import_module(f"{__package__}.{name.lower()}"), name)()
    assert isinstance(rule, UpdateRule)
    return rule


def rule_of(section: OptimizerConfig) -> UpdateRule:
    """Return the rule that the section asks for, with its hyperparameters."""
    return rule_named(section.kind).of(section.hyperparameters)

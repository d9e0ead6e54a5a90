"""Which keys of a section those read who are not `nvme_offload.initialize`, and what they say of the others."""

from .keys import Section
from .section import OffloadConfig

BY_OPTIMIZER = frozenset(
    {
        "zero_optimization",
        "offload",
        "offload_gradients",
        "host_budget",
        "device_budget",
        "aio",
        "gradient_clipping",
        "overlap_step",
        "skip_non_finite",
        "run_log",
    }
)
"""An optimizer by itself reads these; with `gradient_accumulation_steps` and `micro_batch_order` it only plans."""
BY_SWAPPER = frozenset({"zero_optimization", "offload", "aio"})


def unread_text(config: OffloadConfig, who: str, reads: frozenset[str]) -> str | None:
    """Name in a warning the keys that were written, ask for something, and are not read; None without any.

    `who` reads the keys of the top level that are in `reads`.
    """
    names = [name for name in OffloadConfig.model_fields if name not in reads and _asks(config, name)]
    if not names:
        return None
    return (
        f"{who} does not honour these keys of the section: {', '.join(names)}. nvme_offload.initialize does; here the "
        "training loop and the arguments decide. Leave them out, or use initialize"
    )


def _asks(config: OffloadConfig, name: str) -> bool:
    value = getattr(config, name)
    if name not in config.model_fields_set or value in (None, ()):
        return False
    if isinstance(value, Section):
        return getattr(value, "enabled", True)
    return name != "gradient_accumulation_steps" or value > 1


def part_for_optimizer(config: OffloadConfig) -> OffloadConfig:
    """Return what `initialize` hands on to the optimizer it makes: nothing that it honours itself."""
    names = (*BY_OPTIMIZER, "gradient_accumulation_steps", "micro_batch_order")
    given = {name: getattr(config, name) for name in names}
    return OffloadConfig.model_construct(_fields_set=set(BY_OPTIMIZER), **given)

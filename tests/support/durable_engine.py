"""An engine whose steps last, on every tier, and what it must have brought forth."""

from functools import lru_cache
from tempfile import TemporaryDirectory

from tests.support.resuming import fresh_engine, scalars_of, section, steps_of
from tests.support.sharded_model import assert_same, full_state

TIERS = {
    "state": {},
    "everything": {"zero_optimization": {"offload_param": {"device": "nvme"}}, "offload_gradients": {"device": "nvme"}},
    "parameters": {"zero_optimization": {"offload_param": {"device": "nvme"}}},
    "in memory too": {"host_budget": "8MiB"},
    "off": {"overlap_step": "off"},
    "backward": {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False},
    "unclipped": {"overlap_step": "off", "gradient_clipping": 0.0},
    "speculate": {"overlap_step": "speculate"},
    "moments in bf16": {"optimizer": {"params": {"weight_decay": 0.1, "state_dtype": "bf16"}}},
    "moments in int8": {"optimizer": {"params": {"weight_decay": 0.1, "state_dtype": "int8"}}},
}
TIERS |= {f"{name}, logged": {**more, "rewrite_every": 3} for name, more in TIERS.items()}


def durable(mode, path, name, tiers="state", *, other=None, copies=2):
    """An engine with this name of its run, and a copy on an `other` drive; no name: one that ends with its process."""
    more = {key: dict(value) if isinstance(value, dict) else value for key, value in TIERS[tiers].items()}
    made = section(mode, path)
    zero = made["zero_optimization"] | more.pop("zero_optimization", {})
    period = more.pop("rewrite_every", 1)
    if name:
        zero["offload_optimizer"] |= {"durable": name, "rewrite_every": period}
        if other:
            zero["offload_optimizer"] |= {"nvme_path": [str(path), str(other)], "copies": copies}
    elif more.get("overlap_step") == "speculate":  # which has nothing to go back to
        more["overlap_step"] = "off"
    if period > 1:
        zero["offload_optimizer"]["staging_budget"] = "6MiB"
    for part in (zero.get("offload_param"), more.get("offload_gradients")):
        if part:
            part["nvme_path"] = str(path)
    return fresh_engine(mode, path, zero_optimization=zero, **more)


def settle(engine):
    """Have the latest step last, or be said to have failed, on all ranks."""
    engine.optimizer.synchronize()
    engine.optimizer.durable.commits.settle()


def whole(engine):
    return full_state(engine.module, engine.optimizer), scalars_of(engine)


@lru_cache(maxsize=8)
def expected(mode, num_steps, tiers="state", rank=0):
    """Return what a run that ends with its process has after these steps, trained once; on all ranks at a time."""
    with TemporaryDirectory() as path, durable(mode, path, None, tiers) as engine:
        losses = steps_of(engine, rank, range(num_steps))
        return *whole(engine), losses


def assert_goes_on_to(engine, mode, done, num_steps, tiers="state", rank=0):
    losses = steps_of(engine, rank, range(done, num_steps))
    state, scalars, all_losses = expected(mode, num_steps, tiers, rank)
    found, found_scalars = whole(engine)
    assert losses == all_losses[done:], (losses, all_losses)
    assert found_scalars == scalars
    assert_same(found, state)

"""accelerate with FSDP2 on the CPU: its distributed type is forced, because on a CPU it would quietly not shard."""

import os
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType


@contextmanager
def sharding_on_cpu():
    """Accelerators made in the block with an FSDP plugin shard as they do on GPUs; each begins without a past."""
    make = AcceleratorState.__init__

    def make_sharding(state, *arguments, fsdp_plugin=None, **options):
        make(state, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = fsdp_plugin
            if state.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state.mixed_precision)

    AcceleratorState.__init__ = make_sharding
    # What torchrun says; the process group is there already, and nobody meets at this address.
    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", OMP_NUM_THREADS="1")
    forget()
    try:
        yield
    finally:
        AcceleratorState.__init__ = make
        forget()


def forget():
    """What accelerate keeps for the whole process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def accelerator(plugin, **options):
    """An accelerator that shards by `plugin`, on this process's CPU, in the process group that is there."""
    forget()
    made = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    assert made.is_fsdp2
    return made

"""Prepare the process that children are forked from: it imports, and has an engine look at a model.

A child has what is computed once then, such as how torch lays out shards. It looks for garbage in its own objects only.
"""

import atexit
import contextlib
import gc
import sys
from importlib import import_module

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

NAMES = """
hypothesis numpy pytest torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.pipelining
torch.distributed.tensor.parallel nvme_offload.optim.zero.initialize transformers.models.llama.modeling_llama
"""
for name in NAMES.split():
    with contextlib.suppress(ImportError):
        import_module(name)


def look_at_a_model():
    """Have an engine gather one, in a group that moves nothing, without a thread that a fork would not have.

    A backward would keep autograd in each child from finding devices that come later.
    """
    engines, num_threads = import_module("tests.support.small_engine"), torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
        with import_module("nvme_offload").initialize(engines.fresh_model(), engines.section(**engines.BF16)) as engine:
            engines.loss_of(engine, 0, 0, 0)
        dist.destroy_process_group()
    torch.set_num_threads(num_threads)


look_at_a_model()

sys.dont_write_bytecode = False  # as conftest.py has it: a flag of this interpreter may say otherwise
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)

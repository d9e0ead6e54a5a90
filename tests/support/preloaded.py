"""Imports for the process that children are forked from; a child looks for garbage in its own objects only."""

import atexit
import contextlib
import gc
import sys
from importlib import import_module

NAMES = """
hypothesis numpy pytest torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.pipelining
torch.distributed.tensor.parallel nvme_offload.optim.zero.initialize transformers.models.llama.modeling_llama
"""
for name in NAMES.split():
    with contextlib.suppress(ImportError):
        import_module(name)

sys.dont_write_bytecode = False  # as conftest.py has it: a flag of this interpreter may say otherwise
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)

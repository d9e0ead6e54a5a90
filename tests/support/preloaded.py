"""What the process has imported that children are forked from; a child looks for garbage in its own objects only."""

import contextlib
import gc
import sys

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

import nvme_offload.optim.zero.initialize  # noqa: F401

with contextlib.suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

sys.dont_write_bytecode = False  # as conftest.py has it: a flag of this interpreter may say otherwise
gc.collect()
gc.freeze()

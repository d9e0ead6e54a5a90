"""Describe the form of the fp32 master weights in one table for all."""

import enum
from collections.abc import Sequence

import torch

import nvme_offload.optim._kernels as _kernels
from ..rules.rule import State

TILE_NUMEL = _kernels.TILE_NUMEL
"""Elements that a kernel works on at a time. A run starts at a multiple of it within its parameter."""


class MasterForm(enum.IntEnum):
    """The place of the fp32 master weights."""

    SPLIT = 0
    """The master is in two halves: the bf16 parameter (``hi``), and a uint16 tensor with the lower half (``lo``)."""
    FULL = 1
    """The master is an fp32 tensor beside the fp16 parameter."""
    ITSELF = 2
    """The fp32 parameter is its own master."""


FORM_OF_DTYPE = {torch.bfloat16: MasterForm.SPLIT, torch.float16: MasterForm.FULL, torch.float32: MasterForm.ITSELF}
"""The form of the master by the dtype of the parameter; other dtypes have none."""

DTYPE_OF_FORM = {form: dtype for dtype, form in FORM_OF_DTYPE.items()}

MASTER_DTYPE = {MasterForm.SPLIT: torch.uint16, MasterForm.FULL: torch.float32, MasterForm.ITSELF: None}
"""The dtype of the tensor that is kept beside the parameter, by form of the master; None: there is none."""

TAIL_DTYPE = {MasterForm.SPLIT: torch.bfloat16, MasterForm.FULL: None, MasterForm.ITSELF: torch.float32}
"""The dtype of what a parameter has that its state does not say, by form of the master; None: there is nothing."""


def num_tiles(numel: int) -> int:
    """Return the tiles of `TILE_NUMEL` in a run of ``numel`` elements."""
    return -(-numel // TILE_NUMEL)


MARKS_IN_WORD = 64
"""Elements of a parameter that have their marks in one number: whether each has changed."""


def num_marks(numel: int) -> int:
    """Return the numbers that have the marks of ``numel`` elements."""
    return -(-numel // MARKS_IN_WORD)


def sealed_itemsize(form: MasterForm, states: Sequence[State]) -> float:
    """Return bytes per parameter where state and parameter are kept: 12 with two fp32 states, whatever the dtype."""
    dtype = TAIL_DTYPE[form]
    return state_itemsize(form, states) + (dtype.itemsize if dtype else 0)


def state_itemsize(form: MasterForm, states: Sequence[State]) -> float:
    """Return bytes of state per parameter on the tier: with two fp32 states 10 for bf16, 12 for fp16, 8 for fp32."""
    dtype = MASTER_DTYPE[form]
    return sum(state.itemsize for state in states) + (dtype.itemsize if dtype else 0)

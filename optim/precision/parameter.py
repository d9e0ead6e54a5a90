"""One parameter has one precision."""

from dataclasses import dataclass

import torch

from ..layout.master import DTYPE_OF_FORM, MasterForm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in the section."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def stays_as_it_came(param: torch.Tensor) -> bool:
    """Return whether a parameter is kept in its own dtype for good: all but fp32, and what is trained in 16 bits."""
    return param.dtype not in NAMES or (param.dtype in SIXTEEN_BITS and not param.requires_grad)


@dataclass(frozen=True)
class ParameterPrecision:
    """One parameter: in which dtype it is kept, used and trained."""

    compute: torch.dtype | None
    """Dtype of forward and backward; None where autocast decides for every operator."""
    gather: torch.dtype
    """Dtype of the all-gather, and of the gathered parameter; see `gathered`."""
    reduce: torch.dtype
    """Dtype of the reduce-scatter."""
    accumulate: torch.dtype
    """Dtype of the gradient partition, ``p.grad``, in which micro-batches are added up."""
    master: MasterForm = MasterForm.ITSELF
    """The form of the fp32 master weight."""
    in_parts: bool = False
    """Whether the shard is in parts, each of which may be on a tier (`optim.tiers.parts`)."""
    kept_as: torch.dtype | None = None
    """Dtype of a frozen parameter that is kept, saved and exported as it came: it may be codes of a quantized base.

    All but fp32 are. In 16 bits it is cast when it is gathered, if the forward computes in another dtype.
    """

    @property
    def storage(self) -> torch.dtype:
        """Return what this rank keeps of the parameter between steps, and gathers it from."""
        return self.kept_as or DTYPE_OF_FORM[self.master]

    @property
    def gathered(self) -> torch.dtype:
        """Return the dtype of the gathered parameter: `gather`, but for one that is never cast."""
        return self.gather if self.kept_as is None or self.kept_as in SIXTEEN_BITS else self.kept_as

    @property
    def own(self) -> torch.dtype:
        """Return the dtype of its export: as forward has it, or as it is kept; under autocast that of storage."""
        return self.kept_as or self.compute or self.storage

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether a reduction may not wait for the last micro-batch.

        Until then FSDP2 adds up unsharded gradients in the reduce dtype: that must be the accumulation dtype.
        """
        return self.reduce != self.accumulate

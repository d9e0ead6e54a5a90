"""One parameter has one precision."""

from dataclasses import dataclass

import torch

from nvme_offload.optim.layout.master import DTYPE_OF_FORM, MasterForm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in the section."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


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
    """Dtype of a parameter that is none of `DTYPES`, as of a quantized base: it is kept and gathered as it came."""

    @property
    def storage(self) -> torch.dtype:
        """Return what this rank keeps of the parameter between steps, and gathers it from."""
        return self.kept_as or DTYPE_OF_FORM[self.master]

    @property
    def gathered(self) -> torch.dtype:
        """Return the dtype of the gathered parameter: `gather`, but for one that is never cast."""
        return self.kept_as or self.gather

    @property
    def own(self) -> torch.dtype:
        """Return the dtype that forward has it in; under autocast, which casts for each operator, that of storage."""
        return self.kept_as or self.compute or self.storage

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether a reduction may not wait for the last micro-batch.

        Until then FSDP2 adds up unsharded gradients in the reduce dtype: that must be the accumulation dtype.
        """
        return self.reduce != self.accumulate

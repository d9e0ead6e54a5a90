"""How a tensor of any strides is cut into pieces, and how much memory that takes."""

import pytest
import torch

from nvme_offload.offload.swapper.pieces import MAX_PIECE_BYTES, MIN_PIECE_BYTES, piece_starts, spans
from tests.support.sandbox import run_python
from tests.support.swapper_tools import KiB, MiB


@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 4), (4, 1, 1), (2, 3, 1, 5)])
def test_spans_are_the_run_in_order(shape):
    numel = torch.Size(shape).numel()
    dense = torch.arange(numel).view(shape)
    for order in (tuple(range(len(shape))), tuple(reversed(range(len(shape))))):
        tensor = dense.permute(order)
        expected = tensor.flatten()
        for start in range(numel):
            for stop in range(start + 1, numel + 1):
                parts = list(spans(tensor, start, stop))
                assert torch.equal(torch.cat([part.flatten() for part in parts]), expected[start:stop])
                assert len(parts) <= 2 * tensor.dim() + 1
                assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)


def test_pieces_overlap_copies_and_fit_into_buffers():
    assert len(piece_starts(0, 4, 64 * MiB, 4096)) == 0
    assert len(piece_starts(1, 4, 64 * MiB, 4096)) == 1
    assert piece_starts(1 << 30, 4, 64 * KiB, 4096).step == 64 * KiB
    assert piece_starts(1 << 30, 4, 128 * MiB, 4096).step == MAX_PIECE_BYTES
    assert piece_starts(10 * MiB, 4, 128 * MiB, 4096).step == MIN_PIECE_BYTES
    assert len(piece_starts(100 * MiB + 1, 4, 128 * MiB, 4096)) == 4


MEMORY = """
import sys, torch
from pathlib import Path
from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper

def peak():
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024

def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")

MiB = 1 << 20
budget = 32 * MiB
offload = {"device": "nvme", "nvme_path": sys.argv[1], "staging_budget": budget}
with TensorSwapper({"zero_optimization": {"offload_optimizer": offload}}) as swapper:
    for number in range(4):  # the pool is resident from the first use on, and torch has its threads
        swapper.swap_out("warm", torch.ones(budget // 4))
    swapper.synchronize()
    tensor = torch.arange(4 * budget // 8).view(1024, -1).t()
    out = torch.zeros_like(tensor)
    assert tensor.nbytes == 4 * budget and not tensor.is_contiguous()
    forget_peak()
    before = peak()
    swapper.swap_out("x", tensor)
    swapper.swap_in("x", out=out).wait()
    grown = peak() - before
    assert torch.equal(out, tensor)
    print(grown)
"""


def test_a_tensor_of_four_budgets_takes_no_more_memory_than_the_budget(tmp_path):
    """Everything is allocated before: neither strides nor size take more than slack for the interpreter."""
    child = run_python(MEMORY, tmp_path)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 8 * MiB


def test_the_pool_is_the_budget(open_swapper):
    swapper = open_swapper(staging_budget=1 * MiB, buffer_count=8)
    assert swapper.pool.num_buffers == 8
    assert swapper.pool.size_bytes == 1 * MiB

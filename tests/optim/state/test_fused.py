"""Kernels of Triton's: under its interpreter they have the bits of the CPU's; and what they become for a GPU."""

import numpy as np
import pytest
import torch

from tests.optim.state.test_on_device import (
    MIXES,
    NUMEL,
    KernelPool,
    assert_bits_of_the_kernel,
    gradient,
    trained,
    updated_by,
)
from tests.support.late_device.fused import Queued
from tests.support.pairs import each_value_once
from tests.support.rules import CASES, IN_INT8, VARIANTS
from tests.support.training import BLOCK, assert_same_bits, run_child

kernels = pytest.importorskip("nvme_offload.optim.fused.kernels", reason="make triton", exc_type=ImportError)
if not kernels.triton.knobs.runtime.interpret:
    pytest.skip("there is a GPU, where offload verify compares the bits", allow_module_level=True)

COUNTS = pytest.mark.skipif(
    kernels.triton.__version__ < "3.7" and np.__version__ >= "2.4",
    reason="with numpy 2.4 the interpreter of this Triton does not count to a tensor",
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of infinities


updated = updated_by(kernels)


@pytest.mark.parametrize("case", CASES[:1] + CASES[-2:-1], ids=str)
def test_an_update_has_the_bits_of_the_kernel(case):
    assert_bits_of_the_kernel(case, torch.bfloat16, 2049, updated)


@pytest.mark.parametrize(("case", "block"), each_value_once(IN_INT8[1:3], (128, 32)), ids=str)
def test_an_update_in_8_bits_has_the_bits_of_the_kernel(case, block):
    assert_bits_of_the_kernel(case.with_block(block), torch.bfloat16, 2048 + 384, updated)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "changes"), VARIANTS, ids=str)
def test_updates_have_the_bits_of_the_kernel(case, changes, dtype):
    assert_bits_of_the_kernel(case.changed(**changes), dtype, NUMEL, updated)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_of_every_size(case, dtype):
    for numel in (1, 2047, BLOCK - 1, BLOCK):
        assert_bits_of_the_kernel(case, dtype, numel, updated)


@COUNTS
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])]
)
@pytest.mark.parametrize(
    "numel", [0, 1, 33, 1025, *(pytest.param(BLOCK + n, marks=pytest.mark.slow) for n in (-1, 0, 1))]
)
def test_sums_of_squares_have_the_bits_of_the_kernel(numel, dtype):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    assert_same_bits(kernels.tile_sq_sums(grad), KernelPool(1).tile_sq_sums(grad))
    wild = gradient(1, dtype, numel + 10)
    torch.testing.assert_close(
        kernels.tile_sq_sums(wild), KernelPool(1).tile_sq_sums(wild), rtol=0, atol=0, equal_nan=True
    )


def test_a_rule_is_traced_once_for_the_same_bits_of_its_scalars():
    rule = CASES[0].rule
    scalars = rule.scalars(CASES[0].settings, 1)
    update, numbers = kernels.traced(rule, scalars)
    assert kernels.traced(rule, scalars._replace())[1] is numbers
    zero, other = (kernels.traced(rule, scalars._replace(eps=eps)) for eps in (0.0, -0.0))
    assert zero[0] is other[0] is update
    assert [str(number) for number in zero[1]] != [str(number) for number in other[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["device, host and nvme", "device and host"])
def test_state_on_a_device_with_clipping_has_the_bits_of_the_cpu(make_adamw, late, monkeypatch, name):
    """The norm's, too."""
    queued = Queued(kernels)
    monkeypatch.setattr("nvme_offload.optim.state.store.fused_kernels", lambda device: queued)
    expected, state, on_host = trained(make_adamw, "cpu", state="cpu", clip=0.5)
    seen, late_state, stats = trained(make_adamw, "late", clip=0.5, **MIXES[name])
    assert stats.total_norm == on_host.total_norm > 0.5
    assert_same_bits(seen, expected)
    assert_same_bits(late_state, state)
    assert queued.num_launches > 50


COMPILED = """
import re, torch, triton
from collections import Counter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nvme_offload.optim.fused import kernels
from tests.support.rules import IN_INT8, VARIANTS

def compiled(function, types, constants):
    source = ASTSource(function, dict(zip(function.arg_names, types, strict=True)), constants)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": 8, "enable_fp_fusion": False}
    made = triton.compile(source, target=target, options=options).asm
    assert len(made["cubin"]) > 0
    print(*re.findall(r"\\b[a-z]+[.](?:[a-z0-9]+[.])*f(?:16|32|64)\\b", made["ptx"]), sep="\\n")

seen = set()
for case, changes in (*VARIANTS, *((case, {}) for case in IN_INT8)):
    case = case.changed(**changes)
    rule = case.rule
    update, numbers = kernels.traced(rule, rule.scalars(case.settings, 2))
    if update in seen:
        continue
    seen.add(update)
    states = {torch.float32: "*fp32", torch.bfloat16: "*i16", torch.int8: "*i8", torch.uint8: "*u8"}
    states = tuple(states[kept.dtype] for kept in rule.kept)
    origin = ("i64", "i64", "i32", "i32", ("i32", "i32"), ("i64", "i32")) if rule.dithers else ()
    for form, (param, master) in enumerate((("*i16", "*i16"), ("*i16", "*fp32"), ("*fp32", "*fp32"))):
        types = ["constexpr"] * 3 + [param, "*i16", master, states, "*i64", "*i64", "*i64"]
        types += [("fp32",) * len(numbers), "fp32", origin, "*i64", "i32", "constexpr"]
        how = {"UPDATE": update, "FORM": form, "BF16_GRAD": True, "MARKS": form < 2}
        compiled(kernels._update_tile, types, how)
print("squares")
compiled(kernels._sum_tile, ["*i16", "*fp64", "i32", "constexpr"], {"BF16_GRAD": True})
"""


@pytest.mark.slow
def test_what_is_compiled_for_a_gpu_rounds_after_each_operation(tmp_path, monkeypatch):
    """Without a GPU: to the instructions of one, of which none is contracted, approximate or flushes denormals."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    updates, squares = (set(part.split()) for part in run_child(COMPILED, fresh=True, timeout=250).split("squares"))
    rounded = {f"{name}.rn.f32" for name in ("mul", "add", "sub", "div", "sqrt")}
    assert rounded <= updates
    others = {"cvt.rn.f16x2.f32", "cvt.f32.f16", "selp.f32", "setp.gt.f32", "setp.lt.f32", "setp.nan.f32"}
    assert updates <= rounded | others
    assert squares - {"mul.f64", "add.f64"} <= {"cvt.f64.f32", "mul.rn.f64", "add.rn.f64"}

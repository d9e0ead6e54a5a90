"""States in 8 bits: right in the mean, the same bits for whoever has an element, and values that come back."""

import numpy as np
import pytest
import torch

from nvme_offload.optim.kernels import OnAccelerator
from nvme_offload.optim.layout.codes import decoded, store_coded
from nvme_offload.optim.layout.flat import Origin
from nvme_offload.optim.layout.master import TILE_NUMEL, MasterForm
from nvme_offload.optim.updates.in_torch import update_run
from nvme_offload.optim.updates.work import RunTensors
from tests.support.kernel_twins import POOLS, State, Twin, awkward, scalars_at
from tests.support.resuming import fresh_engine, steps_of
from tests.support.rules import CASES, IN_INT8, NAMES
from tests.support.sharded_model import assert_same, full_state
from tests.support.training import (
    assert_same_bits,
    assert_same_training,
    param,
    params_of,
    section,
    storage_io,
    take_steps,
)
from tests.support.twins import decode_reference, encode_reference, round_states

ADAMW = IN_INT8[0]
every_case = pytest.mark.parametrize("case", IN_INT8, ids=str)
SHAPES = [(1030, 128), (65, 64, 3), (41, 100), (129,), (700, 96)]  # in blocks of 128, of 64, not, not, and of 32


@every_case
@pytest.mark.parametrize("form", MasterForm)
def test_every_instruction_set_and_the_operators_give_the_bits_of_the_twin(case, form):
    """Over rows that are zero, huge, lost and of every size of number, in blocks of each size."""
    for block, numel in ((128, 2 * TILE_NUMEL + 384), (64, 4096 + 64), (32, 96)):
        shaped = case.with_block(block)
        weights = (torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 0.02).numpy()
        twin, states = Twin(weights, form, shaped), [State.of(weights, form, shaped) for _ in range(len(POOLS) + 1)]
        for step in (1, 2, 3):
            generator = torch.Generator().manual_seed(step)
            grad = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 3, (numel,), generator=generator)
            grad[:block] = 0
            grad[-block:] *= 1e-30
            if step == 3:
                grad[block : 2 * block] = awkward(block, step)
            grad = grad.bfloat16()
            scalars = scalars_at(step, shaped, maximize=step == 2)
            twin.update(grad, scalars)
            for pool, state in zip(POOLS, states, strict=False):
                state.update(pool, grad, scalars)
                assert state.differs_from(twin) == [], f"step {step}, {pool.isa}, {pool.num_threads} threads, {block}"
            last, origin = states[-1], Origin(0, 0, (numel,), (1,))
            run = RunTensors(last.param, grad, last.master, last.states, None, scalars, origin)
            for piece in run.pieces(TILE_NUMEL):
                update_run(shaped.rule.update, piece, OnAccelerator())
            assert last.differs_from(twin) == [], f"step {step}, operators, {block}"


def test_a_mean_of_small_changes_is_kept():
    """A change of an eighth of the gap between two levels, 4000 times, both ways."""
    value = np.full(4096, 0.53125, np.float32)
    value[::128] = 1.0
    for change in (2**-8, -(2**-8)):
        for step in range(1, 41):
            moved = value + np.where(value < 1, np.float32(change), np.float32(0))
            [value, squares] = round_states(ADAMW.with_block(128).rule, [moved, moved], step)
            assert squares.dtype == np.float32
        change_of_mean = np.delete(value.reshape(-1, 128), 0, axis=1).mean() - 0.53125
        assert abs(change_of_mean - (40 * 2**-8 if change > 0 else 0)) < 0.01


@pytest.mark.parametrize("is_signed", [True, False])
def test_values_that_were_decoded_come_back_exactly_and_others_as_the_nearest(is_signed):
    generator = np.random.default_rng(0)
    values = (generator.normal(size=12800) * 10.0 ** generator.uniform(-9, 3, size=12800)).astype(np.float32)
    values[:384] = awkward(384, 0).numpy()
    values[384:512], values[512:640] = 0, values[512:640] * np.float32(1e-33)
    values = values if is_signed else np.abs(values)
    codes = torch.zeros(12800, dtype=torch.int8 if is_signed else torch.uint8)
    exponents = torch.zeros(100, dtype=torch.uint8)
    for given in (values, None):
        found = decoded(codes, exponents) if given is None else torch.from_numpy(given)
        store_coded(codes, exponents, found)
        expected = encode_reference(found.numpy(), 0x40000, 128, is_signed=is_signed)
        assert_same_bits([codes, exponents], [torch.from_numpy(each) for each in expected])
        kept = decoded(codes, exponents)
        assert_same_bits(kept, torch.from_numpy(decode_reference(*expected, is_signed=is_signed)))
        if given is None:
            assert_same_bits(kept, found)
        blocks, own = np.abs(values.reshape(100, 128)), kept.numpy().reshape(100, 128)
        large = (blocks > blocks.max(1, keepdims=True) / 60) & np.isfinite(own) & (own != 0)
        assert large.any()
        np.testing.assert_allclose(np.abs(own[large]), blocks[large], rtol=1 / 32)


@every_case
def test_nvme_memory_subgroups_and_the_twin_agree_bit_for_bit(case, drive):
    runs = [params_of(SHAPES * 2, torch.bfloat16, torch.float16, torch.float32) for _ in range(3)]
    twin = case.twin(runs[2], clip=1.0)
    settings = [section(drive, buffers=2, clip=1.0, sub_group_size=65536), section(None, clip=1.0)]
    with case.make(runs[0], settings[0]) as nvme, case.make(runs[1], settings[1]) as memory:
        for step in range(4):
            take_steps(nvme, runs[0], step, without=[1], twin=twin)
            take_steps(memory, runs[1], step, without=[1])
        assert "state_dtype: int8" in repr(nvme)
        assert_same_training(nvme, memory)
        twin.assert_equals(nvme)


@every_case
def test_bytes_per_parameter_each_way(case, drive):
    """By the kernel's counters, with the fp32 states of what has one dimension."""
    params = [param((700, 1024)) for _ in range(4)] + [param((1024,)) for _ in range(4)]
    total, wanted = 4 * 700 * 1024, 2 + len(case.rule.states) * (1 + 1 / 128)
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    with case.make(params, section(drive, buffers=2, sub_group_size=10**6)) as optimizer:
        for _ in range(2):
            before, left = storage_io(), optimizer.stats().staging_bytes
            optimizer.step()
            optimizer.synchronize()
            after = storage_io()
        assert wanted * total - left <= after[0] - before[0] <= (wanted + 0.08) * total
        assert wanted * total <= after[1] - before[1] <= (wanted + 0.08) * total <= 4.1 * total


def test_states_of_other_dtypes_load_by_value_and_it_is_said(tmp_path):
    """From each of fp32, bf16 and 8 bits to each other, through state dicts."""
    dtypes = ("fp32", "bf16", "int8")
    made = {dtype: params_of(SHAPES, torch.bfloat16) for dtype in dtypes}
    optimizers = {dtype: CASES[0].make(params, section(), state_dtype=dtype) for dtype, params in made.items()}
    for dtype, optimizer in optimizers.items():
        take_steps(optimizer, made[dtype], 0, 1)
    for source in dtypes:
        saved = optimizers[source].state_dict()
        for target in set(dtypes) - {source}:
            with CASES[0].make(params_of(SHAPES, torch.bfloat16), section(), state_dtype=target) as other:
                with pytest.warns(RuntimeWarning, match=f'state_dtype = "{source}" and are with "{target}" here'):
                    other.load_state_dict(saved)
                assert other.param_groups[0].get("state_dtype", "fp32") == target
                for p, entries in zip(other.param_groups[0]["params"], saved["state"].values(), strict=True):
                    for name in ("exp_avg", "exp_avg_sq"):
                        found, given = other.state[p][name], entries[name]
                        assert ((found - given).abs() <= given.abs() / 32 + given.abs().max() / 2000).all()
                        assert target != "fp32" or torch.equal(found, given)
                take_steps(other, other.param_groups[0]["params"], 2)
    for optimizer in optimizers.values():
        optimizer.close()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_goes_on_with_the_same_bits_and_one_of_fp32_states_by_value(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "state_dtype": "int8"}}
    with fresh_engine("bf16", optimizer=optimizer) as straight:
        assert "int8" in straight.precision_plan.to_json()
        steps_of(straight, 0, range(3))
        straight.save_checkpoint(tmp_path / "int8")
        with fresh_engine("bf16", optimizer=optimizer) as resumed:
            resumed.load_checkpoint(tmp_path / "int8")
            for engine in (straight, resumed):
                steps_of(engine, 0, range(3, 5))
            assert_same(*(full_state(engine.module, engine.optimizer) for engine in (straight, resumed)))
    with fresh_engine("bf16") as wide:
        with pytest.warns(RuntimeWarning, match='state_dtype = "int8" and are with "fp32" here'):
            wide.load_checkpoint(tmp_path / "int8")
        wide.save_checkpoint(tmp_path / "fp32")
    with (
        fresh_engine("bf16", optimizer=optimizer) as back,
        pytest.warns(RuntimeWarning, match='state_dtype = "fp32" and are with "int8" here'),
    ):
        back.load_checkpoint(tmp_path / "fp32")


def test_what_has_no_8_bits_is_refused_in_words():
    for name, settings, words in (
        ("Lion", {"state_dtype": "bf16"}, r"state_dtype = 'bf16': Lion takes \"fp32\" or \"int8\""),
        ("SGD", {"state_dtype": "int8", "momentum": 0.0, "nesterov": False}, "without momentum there is no state"),
        ("AdamW", {"state_dtype": "int4"}, r"AdamW takes \"fp32\" or \"bf16\" or \"int8\""),
    ):
        with pytest.raises(ValueError, match=words):
            NAMES[name].make([param((64, 64))], section(), **settings)
    with pytest.raises(TypeError, match="state_dtype"):
        NAMES["Adagrad"].make([param((64, 64))], section(), state_dtype="int8")


def test_a_state_that_is_set_is_read_as_the_nearest_and_written_back_changes_nothing():
    p = param((64, 128))
    with ADAMW.make([param((64, 128), seed=1), p], section()) as optimizer:
        take_steps(optimizer, params := optimizer.param_groups[0]["params"], 0, 1)
        before = optimizer.state_dict()["state"]
        for each in params:
            for name, value in dict(optimizer.state[each]).items():
                optimizer.state[each][name] = value.clone()
        assert_same_bits(optimizer.state_dict()["state"], before)
        optimizer.state[p]["exp_avg"] = torch.full((64, 128), 0.3)
        assert torch.equal(optimizer.state[p]["exp_avg"], torch.full((64, 128), 0.296875))

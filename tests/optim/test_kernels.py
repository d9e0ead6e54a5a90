"""The native kernels and their number formats against their twins, bit for bit, and what else they promise."""

import itertools
import math
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from nvme_offload import UpdateRule
from nvme_offload.optim import _kernels, kernels
from nvme_offload.optim.kernels import KernelPool, available_isas, make_segment
from nvme_offload.optim.layout.dither import words
from nvme_offload.optim.layout.flat import Origin
from nvme_offload.optim.layout.geometry import Part
from nvme_offload.optim.layout.master import TILE_NUMEL, MasterForm, num_marks, num_tiles
from tests.support.kernel_twins import POOLS, State, Twin, awkward, flushed_denormals, same_bits, scalars_at
from tests.support.pairs import each_value_once
from tests.support.rules import CASES, NAMES
from tests.support.threads import at_once
from tests.support.twins import join_reference, split_reference

NUMELS = (0, 1, 7, 64, 65536, 65537, 200003)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [*itertools.product(NUMELS, GRAD_DTYPES)]
QUICK = [*itertools.product((0, 1, 7, 64), GRAD_DTYPES), *zip((65537, 65536, 200003), GRAD_DTYPES, strict=True)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sizes", [QUICK, pytest.param(SIZES, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("form", MasterForm)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_isa_and_thread_count_gives_the_bits_of_the_twin(case, form, sizes):
    for numel, grad_dtype in sizes:
        generator = torch.Generator().manual_seed(numel)
        weights = (torch.randn(numel, generator=generator) * 0.02).numpy()
        twin = Twin(weights, form, case)
        states = [State.of(weights, form, case) for _ in POOLS]
        for step in range(1, 4):
            grad = (torch.randn(numel, generator=generator) * 0.01).to(grad_dtype)
            scalars = scalars_at(step, case, maximize=step == 3)
            twin.update(grad, scalars)
            for pool, state in zip(POOLS, states, strict=True):
                where = f"{numel} of {grad_dtype}, step {step}, {pool.isa}, {pool.num_threads} threads"
                assert state.update(pool, grad, scalars) == 0, where
                assert state.differs_from(twin) == [], where


@pytest.mark.parametrize(("form", "flush", "grad_dtype"), each_value_once([*MasterForm], [False, True], GRAD_DTYPES))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_hold_for_awkward_numbers_and_under_flush_denormal(case, form, grad_dtype, flush):
    numel = TILE_NUMEL + 1001
    weights = awkward(numel, seed=1).numpy().copy()
    weights[::2] = np.random.default_rng(2).normal(size=len(weights[::2])) * 1e-40
    twin = Twin(weights, form, case)
    states = [State.of(weights, form, case) for _ in POOLS]
    for step in range(1, 4):
        grad = awkward(numel, seed=step + 10)
        grad[1::2] *= 1e-30
        grad = grad.to(grad_dtype)
        scalars = scalars_at(step, case, eps=0.0 if step == 3 else 1e-8)
        twin.update(grad, scalars)
        for pool, state in zip(POOLS, states, strict=True):
            with flushed_denormals(flush):
                state.update(pool, grad, scalars)
            assert state.differs_from(twin) == [], f"step {step}, {pool.isa}, {pool.num_threads} threads"


def test_denormal_gradients_count_under_flush_denormal():
    for pool in POOLS:
        state = State.of(np.zeros(2 * TILE_NUMEL, np.float32), MasterForm.ITSELF)
        grad = torch.full((2 * TILE_NUMEL,), 1e-40)
        with flushed_denormals(True):
            state.update(pool, grad, scalars_at(1, grad_scale=1.0))
            still_flushing = float(np.float32(1e-38) * np.float32(0.01)) == 0.0
        assert still_flushing, "the caller's setting must survive the call"
        assert bool((state.states[0] != 0).all())


@pytest.mark.parametrize(
    ("form", "tile", "pool"), each_value_once([MasterForm.SPLIT, MasterForm.FULL], [0, 2, 3], POOLS)
)
def test_a_block_changed_behind_our_back_is_counted_and_its_master_made_anew(form, tile, pool):
    numel = 3 * TILE_NUMEL + 5
    weights = (torch.randn(numel, generator=torch.Generator().manual_seed(3)) * 0.02).numpy()
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(4))
    twin, state = Twin(weights, form), State.of(weights, form)
    twin.update(grad, scalars_at(1))
    assert state.update(pool, grad, scalars_at(1)) == 0

    state.param.data[tile * TILE_NUMEL + 3] = 0.5
    changed = slice(tile * TILE_NUMEL, min((tile + 1) * TILE_NUMEL, numel))
    twin.master[changed] = state.param[changed].float().numpy()
    for step, num_changed in ((2, 1), (3, 0)):
        twin.update(grad, scalars_at(step))
        assert state.update(pool, grad, scalars_at(step)) == num_changed
        assert state.differs_from(twin) == []


@pytest.mark.parametrize("form", [MasterForm.SPLIT, MasterForm.FULL])
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.isa}-{pool.num_threads}")
def test_marks_say_which_words_updates_changed_until_they_are_taken_away(pool, form):
    numel = 2 * TILE_NUMEL + 4096 + 67
    generator = torch.Generator().manual_seed(5)
    state = State.of((torch.randn(numel, generator=generator) * 0.02).numpy(), form)
    marks, expected = torch.zeros(num_marks(numel), dtype=torch.int64), torch.zeros(numel, dtype=torch.bool)
    for step in (1, 2, 3):
        if step == 2:
            state.param.data[TILE_NUMEL + 3] = 0.5  # of a tile that somebody has changed all is marked
            expected[TILE_NUMEL : 2 * TILE_NUMEL] = True
        before = state.param.clone()
        grad = torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < 0.1)
        state.update(pool, grad, scalars_at(step, lr=1e-5, weight_decay=0.0), marks=marks)
        expected |= before.view(torch.int16) != state.param.view(torch.int16)
        indices, values = pool.marked(marks, numel, state.param, first=70, wide=step == 1)
        assert torch.equal(indices, (expected.nonzero().flatten() + 70).to(indices.dtype))
        assert torch.equal(values.view(torch.int16), state.param[expected].view(torch.int16))
        assert 0 < kernels.num_marked(marks, numel) == int(expected.sum()) < numel
        own = torch.zeros_like(marks)
        pool.mark_changed(before, state.param, own)
        assert torch.equal(pool.marked(own, numel)[0], (before != state.param).nonzero().flatten())
    with pytest.raises(ValueError, match="marks are of 16-bit parameters alone"):
        State.of(np.zeros(64, np.float32), MasterForm.ITSELF).update(
            pool, torch.ones(64), scalars_at(1), marks=marks[:1]
        )


def test_without_checksums_the_master_is_believed():
    weights = np.linspace(-1, 1, 1000, dtype=np.float32)
    twin, state = Twin(weights, MasterForm.FULL), State.of(weights, MasterForm.FULL)
    state.param.data[0] = 0.5
    grad = torch.ones(1000)
    segment = state.segment(grad, scalars_at(1))
    segment.checksums = 0
    assert POOLS[0].update([segment]) == [0]
    twin.update(grad, scalars_at(1))
    assert state.differs_from(twin) == []


def test_many_segments_in_one_call_and_none_without_a_gradient():
    numels = (5, 200_003, 0, TILE_NUMEL, 1, 77_777)
    pool = KernelPool(3)
    states, twins, grads = [], [], []
    for index, numel in enumerate(numels):
        form = MasterForm(index % 3)
        weights = torch.randn(numel, generator=torch.Generator().manual_seed(index)).numpy()
        states.append(State.of(weights, form))
        twins.append(Twin(weights, form))
        grads.append(None if index == 3 else torch.randn(numel).to(GRAD_DTYPES[index % 2]))
    states[1].param.data[TILE_NUMEL] += 1  # of form FULL, in its second tile
    twins[1].master[TILE_NUMEL : 2 * TILE_NUMEL] = states[1].param[TILE_NUMEL : 2 * TILE_NUMEL].float().numpy()
    states[3].param.data[0] += 1
    left_alone = states[3].param.clone()

    segments = [state.segment(grad, scalars_at(1)) for state, grad in zip(states, grads, strict=True)]
    assert pool.update(segments) == [0, 1, 0, 0, 0, 0]
    for state, twin, grad in zip(states, twins, grads, strict=True):
        if grad is not None:
            twin.update(grad, scalars_at(1))
            assert state.differs_from(twin) == []
    assert same_bits(states[3].param, left_alone)
    assert not states[3].states[0].any()
    assert pool.update([]) == []


def test_square_sums_depend_on_nothing_but_the_gradient():
    """Sums of several gradients at once are those of each alone."""
    grads, all_sums = [], []
    for numel, dtype in SIZES:
        grads.append((torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3).to(dtype))
        sums = [pool.tile_sq_sums(grads[-1]) for pool in POOLS]
        assert all(same_bits(each, sums[0]) for each in sums), (numel, dtype)
        assert len(sums[0]) == num_tiles(numel)
        exact = math.fsum((grads[-1].double() ** 2).tolist())
        assert kernels.ordered_sum(sums[0]) == pytest.approx(exact, rel=1e-12)
        all_sums.append(sums[0])
    assert all(same_bits(pool.tile_sq_sums(*grads), torch.cat(all_sums)) for pool in POOLS)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e-42])
def test_square_sums_of_non_finite_and_denormal_gradients(value):
    grad = torch.zeros(2 * TILE_NUMEL)
    grad[TILE_NUMEL + 7] = value
    square = float(grad[TILE_NUMEL + 7]) ** 2
    for pool in POOLS:
        with flushed_denormals(True):
            sums = pool.tile_sq_sums(grad)
        np.testing.assert_array_equal(sums.numpy(), [0.0, square])


def test_ordered_sum_adds_in_index_order():
    assert kernels.ordered_sum(torch.tensor([1e16, 1.0, 1.0, -1e16], dtype=torch.float64)) == 0.0
    assert kernels.ordered_sum(torch.tensor([1.0, 1.0, 1e16, -1e16], dtype=torch.float64)) == 2.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_checksums_are_the_same_everywhere_and_see_every_element(dtype):
    for numel in NUMELS:
        tensor = torch.randint(0, 100, (numel,)).to(dtype)
        sums = POOLS[0].tile_checksums(tensor)
        assert all(torch.equal(pool.tile_checksums(tensor), sums) for pool in POOLS)
        for index in {0, 63, 64, numel // 2, numel - 2, numel - 1} & set(range(numel)):
            changed = tensor.clone()
            changed[index] += 1
            differs = POOLS[-1].tile_checksums(changed) != sums
            assert differs.nonzero().flatten().tolist() == [index // TILE_NUMEL]


def test_checksums_see_pairs_of_sign_flips_and_swaps():
    tensor = torch.randn(TILE_NUMEL, generator=torch.Generator().manual_seed(5)).bfloat16()
    pool = POOLS[-1]
    before = pool.tile_checksums(tensor)
    for distance in (1, 2, 64, 128, 256, 1024, 32768):
        for first in (0, 1, 5000):
            pair = [first, first + distance]
            flipped, swapped = tensor.clone(), tensor.clone()
            flipped[pair] *= -1
            swapped[pair] = tensor[pair[::-1]]
            assert pool.tile_checksums(flipped) != before
            assert tensor[pair[0]] == tensor[pair[1]] or pool.tile_checksums(swapped) != before
    assert pool.tile_checksums(-tensor) != before


def worker_tasks(before: set[Path]) -> set[Path]:
    return set(Path("/proc/self/task").iterdir()) - before


def wait_until_none_is_left(before: set[Path]) -> None:
    """The kernel lists a thread for a moment after it was joined."""
    while worker_tasks(before):
        time.sleep(0.001)


def test_threads_start_late_block_signals_and_end_with_the_pool():
    grad = torch.zeros(2 * TILE_NUMEL)  # torch may start threads of its own here
    tasks = set(Path("/proc/self/task").iterdir())
    pool = KernelPool(3)
    pool.tile_sq_sums(grad[:TILE_NUMEL])
    assert pool.num_workers == 0
    assert not worker_tasks(tasks)
    pool.tile_sq_sums(grad)
    assert pool.num_workers == 2
    workers = worker_tasks(tasks)
    assert len(workers) == 2
    for worker in workers:
        status = dict(line.split(":\t", 1) for line in (worker / "status").read_text().splitlines())
        blocked = int(status["SigBlk"], 16)
        assert all(blocked >> (each - 1) & 1 for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    pool.end_workers()
    assert pool.num_workers == 0
    wait_until_none_is_left(tasks)
    pool.tile_sq_sums(grad)
    assert pool.num_workers == 2
    del pool
    wait_until_none_is_left(tasks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads is what this is about
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_forked_child_can_use_and_drop_the_pool(busy):
    pool = KernelPool(3)
    tensor = torch.randn(20 * TILE_NUMEL)
    expected = pool.tile_checksums(tensor).tolist()
    stop = threading.Event()

    def keep_pool_busy():
        while not stop.is_set():
            pool.tile_checksums(tensor)

    background = threading.Thread(target=keep_pool_busy, daemon=True)
    if busy:
        background.start()
    codes = []
    for _ in range(10 if busy else 1):
        pid = os.fork()
        if pid == 0:
            right = pool.num_workers == 0 and pool.tile_checksums(tensor).tolist() == expected
            del pool
            os._exit(0 if right else 1)
        codes.append(os.waitpid(pid, 0)[1])
    stop.set()
    if busy:
        background.join()
    assert not any(codes)
    assert pool.tile_checksums(tensor).tolist() == expected


def test_calls_from_several_threads_take_turns():
    pool = KernelPool(2)
    tensors = [torch.randn(5 * TILE_NUMEL + i) for i in range(4)]
    expected = [POOLS[0].tile_checksums(tensor) for tensor in tensors]

    def check(index):
        return all(torch.equal(pool.tile_checksums(tensors[index]), expected[index]) for _ in range(50))

    assert at_once([partial(check, index) for index in range(4)]) == [True] * 4


@pytest.mark.quiet
def test_the_gil_is_free_while_a_kernel_runs():
    pool = KernelPool(1, isa="portable")
    state = State.of(np.ones(2**23, np.float32), MasterForm.FULL)
    grad = torch.ones(2**23, dtype=torch.float16)  # a segment has its address alone
    segment = state.segment(grad, scalars_at(1))
    count, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            count[0] += 1
            time.sleep(0.001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on the GIL changes hands only where somebody lets go of it
    ticker = threading.Thread(target=tick)
    try:
        ticker.start()
        before = count[0]
        pool.update([segment])
        during = count[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        ticker.join()
    assert during >= 3


class NoKernel(UpdateRule):
    name = "own rule"


def test_what_cannot_be_right_is_refused_in_words():
    weights = torch.zeros(8)
    good = {
        "param": torch.zeros(8, dtype=torch.bfloat16),
        "grad": weights,
        "master": torch.zeros(8, dtype=torch.uint16),
        "states": [weights, weights],
        "checksums": None,
        "rule": NAMES["AdamW"].rule,
        "scalars": scalars_at(1).of_rule,
        "grad_scale": 1.0,
    }
    bad = [
        ({"param": torch.zeros(8, dtype=torch.float64)}, r"param is torch.float64"),
        ({"param": weights}, r"fp32 parameter is its own master"),
        ({"master": None}, r"torch.uint16 is needed"),
        ({"master": weights}, r"master is torch.float32; it must be torch.uint16"),
        ({"grad": torch.zeros(8, dtype=torch.int32)}, r"grad is torch.int32"),
        ({"states": [torch.zeros(7), weights]}, r"exp_avg has 7 elements; it must have 8"),
        ({"states": [weights, torch.zeros(16)[::2]]}, r"exp_avg_sq is not contiguous"),
        ({"states": [torch.zeros(8, device="meta"), weights]}, r"exp_avg is on meta"),
        ({"states": [weights]}, r"AdamW has 2 states, not 1"),
        ({"rule": NoKernel()}, r"own rule has no native kernel; those are of AdamW"),
        ({"checksums": torch.zeros(2, dtype=torch.int64)}, r"checksums has 2 elements; it must have 1"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            make_segment(**{**good, **change})
    with pytest.raises(ValueError, match=r"isa 'sse9' is not available .*portable"):
        KernelPool(1, isa="sse9")
    with pytest.raises(ValueError, match=r"num_threads is 0"):
        KernelPool(0)
    with pytest.raises(ValueError, match=r"values is torch.float32"):
        kernels.ordered_sum(weights)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("states", [0, 64], "state is a null address"),
        ("states", [64], "AdamW takes 2 states, not 1"),
        ("scalars", [1.0], "AdamW takes 7 scalars, not 1"),
        ("rule", 99, "rule is 99"),
        ("param", 2**20 + 1, "param is not aligned to its 2-byte elements"),
        ("form", 3, "form is 3; it must be 0 to 2"),
        ("grad_dtype", -1, "grad_dtype is -1"),
        ("numel", -1, "numel is -1"),
    ],
)
def test_a_bad_segment_stops_the_call_before_anything_is_touched(field, value, message):
    state = State.of(np.ones(100, np.float32), MasterForm.SPLIT)
    grad = torch.ones(100)
    good, bad = (state.segment(grad, scalars_at(1)) for _ in range(2))
    setattr(bad, field, value)
    with pytest.raises(ValueError, match=message):
        POOLS[0].update([good, bad])
    assert not state.states[0].any()


def test_the_stub_names_what_the_module_has():
    stub = Path(kernels.__file__).with_name("_kernels.pyi")
    declared = {}
    exec(compile(stub.read_text(), stub, "exec"), declared)  # a stub is Python whose bodies are `...`
    names = {name for name in declared if not name.startswith("_")} - {"Sequence", "Final"}
    assert names == {name for name in dir(_kernels) if not name.startswith("_")} - {"TILE_NUMEL"}
    for name in names:
        members = {each for each in vars(declared[name]) if not each.startswith("_")} if name[0].isupper() else set()
        annotated = set(getattr(declared[name], "__annotations__", {})) if name[0].isupper() else set()
        assert all(hasattr(getattr(_kernels, name), each) for each in members | annotated)


CHUNK = 2**19  # bit patterns at once, few enough for the cache: one sixteenth of a sign and exponent

EDGES = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000, 0x3F808000, 0x3F818000, 0x3F7FFFFF, 0x7F7F7FFF, 0x7F7F8000]
EDGES += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F808000, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]

pools = pytest.mark.parametrize("pool", [KernelPool(2, isa=isa) for isa in available_isas()], ids=lambda pool: pool.isa)


def edges_and_samples(num_samples: int) -> np.ndarray:
    edges = np.array(EDGES, np.uint32)
    samples = np.random.default_rng(0).integers(0, 2**32, num_samples, np.uint32)
    return np.concatenate([edges, edges | np.uint32(2**31), samples]).astype(np.uint32).view(np.float32)


@pools
def test_halves_are_those_of_the_twin_and_the_upper_one_is_torchs_bf16_except_for_ties(pool):
    values = edges_and_samples(1_000_003)
    hi, lo = pool.split(torch.from_numpy(values))
    expected_hi, expected_lo = split_reference(values)
    np.testing.assert_array_equal(hi.view(torch.int16).numpy().view(np.uint16), expected_hi)
    np.testing.assert_array_equal(lo.numpy(), expected_lo)
    joined = pool.join(hi, lo).numpy()
    np.testing.assert_array_equal(joined.view(np.uint32), join_reference(expected_hi, expected_lo).view(np.uint32))
    whole, tie = torch.from_numpy(values), lo.view(torch.int16) == -0x8000
    plain = ~tie & ~whole.isnan()
    assert torch.equal(hi[plain], whole.bfloat16()[plain])
    assert bool((hi[tie].double().abs() > whole[tie].double().abs()).all())


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_fp32_number_comes_back(stride):
    """Exponent 255 of each sign is infinity and then nothing but NaNs, which may come back as other NaNs."""
    pool = KernelPool(2)
    mantissas, bits = torch.arange(CHUNK, dtype=torch.int32), torch.empty(CHUNK, dtype=torch.int32)
    hi, lo = torch.empty(CHUNK, dtype=torch.bfloat16), torch.empty(CHUNK, dtype=torch.uint16)
    joined = torch.empty(CHUNK)
    for start in range(-(2**31), 2**31, stride * CHUNK):  # the negative ones have the sign bit set
        torch.add(mantissas, start, out=bits)
        values = bits.view(torch.float32)
        pool.split(values, out=(hi, lo))
        pool.join(hi, lo, out=joined)
        if start & 0x7F800000 != 0x7F800000:
            assert torch.equal(joined.view(torch.int32), bits), f"from {start:#x}"
            continue
        infinities = int(start & 0x7FFFFF == 0)
        assert torch.equal(joined[:infinities], values[:infinities])
        assert bool(joined[infinities:].isnan().all())
        assert bool(hi[infinities:].isnan().all())
        assert not lo.view(torch.int16).any()


@pools
def test_shapes_stay_and_outputs_are_used(pool):
    values = torch.randn(3, 5)
    out = (torch.empty(15, dtype=torch.bfloat16), torch.empty(15, dtype=torch.uint16))
    hi, lo = pool.split(values)
    assert hi.shape == lo.shape == pool.join(hi, lo).shape == values.shape
    assert pool.split(values, out=out)[0] is out[0]
    assert torch.equal(out[0].view(3, 5), hi)
    flat = torch.empty(15)
    assert pool.join(hi, lo, out=flat) is flat
    assert torch.equal(flat.view(3, 5), values)


@pytest.mark.parametrize("numel", [0, 1, 7, 65537])
def test_nothing_is_written_past_the_end(numel):
    values = torch.randn(numel)
    for isa in available_isas():
        hi, lo = torch.full((numel + 64,), 7.0).bfloat16(), torch.full((numel + 64,), 7, dtype=torch.uint16)
        KernelPool(2, isa=isa).split(values, out=(hi[:numel], lo[:numel]))
        assert bool((hi[numel:] == 7).all())
        assert lo[numel:].tolist() == [7] * 64


def test_misfits_are_refused_in_words():
    pool = KernelPool(1)
    values = torch.zeros(4)
    hi, lo = pool.split(values)
    with pytest.raises(ValueError, match=r"src is torch.float64"):
        pool.split(values.double())
    with pytest.raises(ValueError, match=r"lo has 3 elements; it must have 4"):
        pool.join(hi, lo[:3])
    with pytest.raises(ValueError, match=r"lo is torch.bfloat16; it must be torch.uint16"):
        pool.join(hi, hi)
    with pytest.raises(ValueError, match=r"src is not contiguous"):
        pool.split(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match=r"src is torch.float32; it must be torch.float16"):
        pool.fp16_to_fp32(values)
    for call in (lambda: pool.update([None]), lambda: kernels.renew([None], [0], [0], [0], [scalars_at(1)])):
        with pytest.raises(ValueError, match=r"a segment is None"):
            call()


@pools
@pytest.mark.parametrize("flush", [False, True], ids=["keep", "flush"])
def test_every_fp16_number_widens_as_in_torch(pool, flush):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    expected = halves.float()
    torch.set_flush_denormal(flush)
    try:
        widened = pool.fp16_to_fp32(halves)
        narrowed = pool.fp32_to_fp16(widened)
    finally:
        torch.set_flush_denormal(False)
    nan = halves.isnan()
    assert torch.equal(widened[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    assert torch.equal(narrowed[~nan].view(torch.int16), halves[~nan].view(torch.int16))
    quiet = 0x00400000
    assert bool((widened[nan].isnan() & (widened[nan].view(torch.int32) & quiet != 0)).all())
    assert bool(narrowed[nan].isnan().all())


@pools
def test_fp32_narrows_as_in_torch_at_every_tie_and_beside_it(pool):
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    following = torch.cat([halves[1:], torch.tensor([65536.0], dtype=torch.float64)])
    ties = ((halves + following) / 2).float().view(torch.int32)
    magnitudes = torch.cat([ties - 1, ties, ties + 1]).view(torch.float32)
    samples = torch.from_numpy(edges_and_samples(2**22))
    spread = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 1e-5  # normal and denormal halves
    values = torch.cat([magnitudes, -magnitudes, samples, spread])
    narrowed, expected = pool.fp32_to_fp16(values), values.half()
    nan = values.isnan()
    assert torch.equal(narrowed[~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert bool(narrowed[nan].isnan().all())


HOST = torch.device("cpu")


def chances(step, param=0, numel=2**16):
    return words(Origin(param, 0, (numel,), (1,)), 0, numel, step, HOST)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize("cuts", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_an_element_has_the_same_chance_in_every_part(order, cuts):
    whole = (6, 4, 10)
    flat = [whole[dim] for dim in order]
    everywhere = chances(3, 7, 240).reshape(flat).permute(*sorted(range(3), key=order.__getitem__))
    for half in (0, 1):
        shape = tuple(size // 2 if dim in cuts else size for dim, size in enumerate(whole))
        offsets = tuple(half * size if dim in cuts else 0 for dim, size in enumerate(shape))
        part = Part(torch.Size(whole), offsets, shape, order)
        origin = part.origin(7)
        numel = part.whole.numel() // 2 ** len(cuts)
        found = torch.cat([words(origin, start, min(start + 50, numel), 3, HOST) for start in range(0, numel, 50)])
        box = everywhere[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))]
        assert torch.equal(found, box.permute(order).flatten())


def test_chances_have_no_pattern():
    """Each bit is set in half of the cases, whatever the others, the elements beside, steps and parameters say."""
    drawn = [chances(step, param) for step, param in ((1, 0), (2, 0), (1, 1), (2**24 - 1, 0), (2, 1))]
    bits = torch.stack([word >> bit & 1 for word in drawn for bit in range(32)]).double() * 2 - 1
    bits = torch.cat([bits, bits.roll(1, 1), bits.roll(64, 1)])
    correlated = bits @ bits.T / bits.shape[1]
    correlated.fill_diagonal_(0)
    limit = 6 / bits.shape[1] ** 0.5  # six sigma, of 115,000 pairs
    assert float(bits.mean(1).abs().max()) < limit
    assert float(correlated.abs().max()) < limit

"""State, parameters and gradients on a device: the bits of the CPU's kernel, however late anything comes."""

import contextlib
import math
import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvme_offload import ConfigError, FaultSpec, OffloadConfig, OffloadMuon
from nvme_offload.optim.kernels import KernelPool, OnAccelerator, make_segment
from nvme_offload.optim.layout.flat import Origin
from nvme_offload.optim.layout.master import TILE_NUMEL, num_marks
from nvme_offload.optim.step.norm import sums_from_device
from nvme_offload.optim.updates.in_torch import update_run, update_run_fused
from nvme_offload.optim.updates.mirrored import DeviceMirror
from nvme_offload.optim.updates.work import RunTensors, StepScalars
from tests.support.late_device.mutations import OF_COMMITS, OF_MIRROR
from tests.support.rules import CASES, VARIANTS
from tests.support.training import AWKWARD_SHAPES, BLOCK, assert_same_bits, faulty_drive, params_of, set_grads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = 4


def trained(make_adamw, device, *, clip=0.0, **section):
    """Parameters as the device sees them after each step, state, stats."""
    params = [torch.nn.Parameter(p.detach().to(device)) for p in params_of(AWKWARD_SHAPES, *DTYPES)]
    optimizer = make_adamw(params, section.pop("state", "nvme"), clip=clip, sub_group_size=65536, **section)
    seen = []
    for step in range(STEPS):
        host = params_of(AWKWARD_SHAPES, *DTYPES)
        set_grads(host, step, without=(step,))
        for parameter, twin in zip(params, host, strict=True):
            # Computed there, so that it is not final before somebody waits.
            parameter.grad = None if twin.grad is None else twin.grad.to(device).neg().neg_()
        take_step(optimizer)
        seen.append([parameter.detach().clone() for parameter in params])  # what the next forward would read
        for parameter in params:
            parameter.grad = None
    return [[p.cpu() for p in each] for each in seen], optimizer.state_dict()["state"], optimizer.stats()


def take_step(optimizer):
    """Take one, however often the drive fails."""
    number = optimizer.stats().steps + 1
    while optimizer.stats().steps < number:
        with contextlib.suppress(OSError):
            if optimizer.has_unfinished_step:
                optimizer.finish_step()
            else:
                optimizer.step()


@pytest.mark.parametrize("buffers", [0, pytest.param(2, marks=pytest.mark.slow), 4])
def test_parameters_on_a_device_follow_the_same_kernel(make_adamw, late, buffers):
    section = {"buffers": buffers} if buffers else {"state": "cpu"}
    expected, state, _ = trained(make_adamw, "cpu", **section)
    seen, late_state, stats = trained(make_adamw, "late", **section)
    assert_same_bits(seen, expected)
    assert_same_bits(late_state, state)
    assert stats.steps == STEPS
    assert late.num_copies > 100


@pytest.mark.slow
@pytest.mark.parametrize("device_budget", [None, "1MiB"])
def test_steps_that_stop_halfway_with_copies_under_way_are_finished(make_adamw, late, device_budget):
    expected, _, _ = trained(make_adamw, "cpu")
    with faulty_drive(FaultSpec(seed=3, eio=0.04)):
        seen, _, _ = trained(make_adamw, "late", device_budget=device_budget)
    assert_same_bits(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_MIRROR)
def test_a_mistake_with_a_mirror_is_found(make_adamw, late, mutation):
    expected, _, _ = trained(make_adamw, "cpu", state="cpu")
    with OF_MIRROR[mutation]():
        seen, _, _ = trained(make_adamw, "late", state="cpu")
    with pytest.raises(AssertionError):
        assert_same_bits(seen, expected)


@pytest.mark.parametrize("mistake", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in OF_COMMITS)])
def test_what_is_committed_of_parameters_on_a_device_is_what_they_became(late, tmp_path, mistake, monkeypatch):
    """The rule works in torch operators and leaves the parameters to whoever writes them.

    In the last step a copy to the device finds no memory, and what is changed so far is written before it is made.
    """
    copy_back, refused = DeviceMirror.copy_back, []

    def copied_back(*given):
        if optimizer.stats().steps == 1 and not refused:
            raise refused.append(given) or torch.OutOfMemoryError
        copy_back(*given)

    monkeypatch.setattr(DeviceMirror, "copy_back", copied_back)

    def optimizer_on(device):
        params = [torch.nn.Parameter(p.detach().to(device)) for p in params_of([(300, 257)] * 3, torch.bfloat16)]
        state = {"device": "nvme", "nvme_path": str(tmp_path), "durable": True}
        section = {"zero_optimization": {"offload_optimizer": state, "sub_group_size": BLOCK}}
        return params, OffloadMuon(params, lr=0.01, offload=section)

    params, optimizer = optimizer_on("late")
    with OF_COMMITS[mistake]() if mistake else contextlib.nullcontext(), optimizer:
        for _ in range(2):
            for parameter in params:
                parameter.grad = parameter.detach().neg()
            with pytest.raises(torch.OutOfMemoryError) if optimizer.stats().steps else contextlib.nullcontext():
                optimizer.step()
        optimizer.synchronize()
        optimizer.finish_step()
        expected = [parameter.detach().cpu() for parameter in params]
    params, optimizer = optimizer_on("cpu")
    with optimizer, pytest.raises(AssertionError) if mistake else contextlib.nullcontext():
        assert optimizer.resume()[0] == 2
        assert_same_bits([parameter.detach() for parameter in params], expected)


def test_a_mirror_that_cannot_be_made_leaves_the_one_before(make_adamw, late):
    """A later group that needs larger mirrors is refused when no memory can be pinned for them."""
    params = [torch.nn.Parameter(p.detach().to("late")) for p in params_of([(100,)], *DTYPES)]
    optimizer = make_adamw(params, pin_memory=True)
    optimizer.place()
    mirror = optimizer.store.mirror
    before, locked = mirror.size_bytes, dict(late.pinned)
    larger = [torch.nn.Parameter(p.detach().to("late")) for p in params_of([(3 * 65536,)], *DTYPES)]
    late.refusals = 1
    with pytest.raises(RuntimeError, match=r"cudaHostRegister refused .*lower zero_optimization.sub_group_size, or"):
        optimizer.add_param_group({"params": larger})
    assert (mirror.size_bytes, late.pinned) == (before, locked)
    optimizer.add_param_group({"params": larger})
    assert mirror.size_bytes > before
    assert [*late.pinned.values()] == [mirror.size_bytes]


@pytest.mark.parametrize(("device", "state", "number"), [("late", "cpu", 4), ("cpu", "cpu", 16), ("late", "nvme", 16)])
def test_left_out_subgroups_are_few_where_each_keeps_a_device_waiting(
    make_adamw, late, monkeypatch, device, state, number
):
    monkeypatch.setattr("nvme_offload.offload.config.section._SUBGROUP_SIZE", 65536)
    monkeypatch.setattr("nvme_offload.offload.config.section._MANY_SUBGROUPS", 4)
    optimizer = make_adamw([torch.nn.Parameter(torch.zeros(16 * 65536).to(device))], state, sub_group_size=0)
    optimizer.place()
    assert optimizer.stats().num_subgroups == number


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_parameters_follow_the_same_kernel(make_adamw):
    """Without clipping the update itself is the CPU's, bit for bit."""
    seen, _, stats = trained(make_adamw, "cuda")
    expected, _, host_stats = trained(make_adamw, "cpu")
    assert stats.total_norm == pytest.approx(host_stats.total_norm, rel=1e-9)
    assert_same_bits(seen, expected)


@pytest.fixture
def five(make_adamw, late):
    """The mirror of one parameter in five subgroups in a step, with these, the parameter and its gradient."""
    params = [torch.nn.Parameter(p.detach().to("late")) for p in params_of([(5 * 65536,)], torch.float32)]
    optimizer = make_adamw(params, "cpu", sub_group_size=65536)
    optimizer.place()
    mirror, subgroups = optimizer.store.mirror, [slot.subgroup for slot in optimizer.store.slots]
    grads = {0: torch.arange(5.0 * 65536).to("late")}
    mirror.begin_step()
    return mirror, subgroups, params, grads


def test_what_was_fetched_and_did_not_come_next_is_fetched_again(five):
    """Behind a step whoever waits for a subgroup has it updated first: others were fetched before."""
    mirror, subgroups, params, grads = five
    chosen = random.Random(0)
    orders = [(chosen.randrange(5), chosen.randrange(5)) for _ in range(40)]
    for first, ahead in ((0, 1), (2, 3), (1, 4), *orders):
        for place in (first, ahead):
            mirror.fetch(subgroups[place], params.__getitem__, grads)
        [run] = subgroups[first].runs
        copies = mirror.take(subgroups[first])
        assert torch.equal(copies.copies[run.param].grad, torch.arange(float(run.start), run.stop))
        mirror.copy_back(copies)


def test_what_comes_down_does_not_wait_for_what_goes_up(five):
    """But for the bytes in the mirror that it is to fill."""
    mirror, subgroups, params, grads = five
    gone = []
    for place in range(4):
        for each in subgroups[place : place + 2]:
            mirror.fetch(each, params.__getitem__, grads)
        copies = mirror.take(subgroups[place])
        gone.append(mirror._up._stream.done)
        mirror.copy_back(copies)
    assert gone == [0, 0, 0, 1]


NUMEL = TILE_NUMEL + 1234


def wild(numel, seed):
    """Numbers of every magnitude, some of any bits."""
    generator = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=generator, dtype=torch.int32).view(torch.float32)
    plain = torch.randn(numel, generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < 0.2, any_bits, plain)


def weights(dtype, rule, pool, numel=NUMEL):
    """Parameter, what is beside it, and fresh states."""
    param = torch.empty(numel, dtype=dtype)
    lower = {torch.bfloat16: torch.empty(numel, dtype=torch.uint16), torch.float16: torch.empty(numel)}.get(dtype)
    if lower is None:
        param.copy_(wild(numel, 1))
    else:
        pool.divide(wild(numel, 1), param, lower)
    return param, lower, [torch.zeros(numel // kept.per, dtype=kept.dtype) for kept in rule.kept]


def gradient(step, dtype, numel=NUMEL):
    """Some of everything, also infinities, NaNs and denormals."""
    grad = wild(numel, 10 + step) * 0.1
    grad[::97], grad[5::1001], grad[7::1003], grad[9::501] = 0.0, math.inf, math.nan, 1e-40
    return grad.to(dtype)


def assert_bits_of_the_kernel(case, dtype, numel, update):
    """Take three steps with gradients of three dtypes; in the second one somebody else has changed a tile."""
    pool, there, rule, is_half = KernelPool(1), OnAccelerator(), case.rule, dtype is not torch.float32
    ours, theirs = weights(dtype, rule, pool, numel), weights(dtype, rule, pool, numel)
    # The part is 10 x 11 x 640 of a larger tensor, and the run begins in it behind some elements.
    origin = Origin(3, 2**32 - 2**23, (10, 11, 640), (2**20, 2**13, 1)) if rule.dithers else None
    start = rule.block or 11
    sums, known = (there.tile_checksums(ours[0]), pool.tile_checksums(theirs[0])) if is_half else (None, None)
    marks = [torch.zeros(num_marks(numel), dtype=torch.int64) if is_half else None for _ in range(2)]
    for step, grad_dtype in enumerate((torch.bfloat16, torch.float16, torch.float32), start=1):
        if step == 2 and is_half:
            ours[0][numel // 2] = theirs[0][numel // 2] = 1.5
        grad, scale = gradient(step, grad_dtype, numel), float(np.float32(0.7))
        scalars = StepScalars(rule.scalars(case.settings, step), scale, (step,) if rule.dithers else ())
        run = RunTensors(ours[0], grad, ours[1], ours[2], sums, scalars, origin, start, marks[0])
        segment = make_segment(
            param=theirs[0], grad=grad, master=theirs[1], states=theirs[2], checksums=known, rule=rule,
            scalars=scalars.of_kernel, grad_scale=scale, origin=origin, start=start, marks=marks[1],
        )  # fmt: skip
        assert int(update(rule, run)) == sum(pool.update([segment])) == (step == 2 and is_half)
        assert sums is None or torch.equal(sums, there.tile_checksums(ours[0]))
        assert sums is None or torch.equal(*marks)
        flat = [[part for part in (each[0], each[1], *each[2]) if part is not None] for each in (ours, theirs)]
        for one, other in zip(*flat, strict=True):
            as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.element_size()]
            assert torch.equal(one.view(as_int), other.view(as_int))


def updated_by(kernels):
    """The update by kernels of Triton's, which is compared there where it is installed."""
    return lambda rule, run: update_run_fused(kernels, rule, run)


THERE = OnAccelerator()


@pytest.mark.parametrize(("case", "changes"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_give_the_bits_of_the_kernel(case, changes, dtype):
    assert_bits_of_the_kernel(
        case.changed(**changes), dtype, NUMEL, lambda rule, run: update_run(rule.update, run, THERE)
    )


def test_a_changed_element_shows():
    param = wild(2 * TILE_NUMEL + 5, 4).bfloat16()
    before = THERE.tile_checksums(param)
    assert before.shape == (3,)
    for place in (0, TILE_NUMEL - 1, TILE_NUMEL, 2 * TILE_NUMEL + 4):
        changed = param.clone()
        changed.view(torch.int16)[place] ^= 1
        assert (THERE.tile_checksums(changed) != before).nonzero().flatten().tolist() == [place // TILE_NUMEL]
    swapped = param.clone()
    swapped[[3, 4]] = param[[4, 3]]
    assert THERE.tile_checksums(swapped)[0] != before[0]


MIXES = {
    "all on the device": {"state": "cpu", "device_budget": "1GiB"},
    "device and host": {"state": "cpu", "device_budget": "2MiB"},
    "device and nvme": {"device_budget": "2MiB"},
    "device, host and nvme": {"device_budget": "1MiB", "host_budget": "8MiB"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "device, host and nvme")) for name in MIXES]
)
def test_every_mix_has_the_bits_of_the_cpu(make_adamw, late, name):
    expected, state, _ = trained(make_adamw, "cpu", state="cpu", clip=0.0)
    seen, late_state, stats = trained(make_adamw, "late", **MIXES[name])
    assert_same_bits(seen, expected)
    assert_same_bits(late_state, state)
    assert stats.steps == STEPS
    on_device, on_host = stats.device_state_bytes, stats.host_state_bytes
    assert 0 < on_device <= stats.state_bytes
    assert (on_device == stats.state_bytes) == (name == "all on the device")
    assert (on_host > 0) == ("host" in name)
    assert (stats.bytes_written > 0) == ("nvme" in name)


def on_device(make_adamw, shapes, dtypes=DTYPES, device="cpu", budget="1GiB", **more):
    """An optimizer over parameters on the stand-in, and those."""
    params = [torch.nn.Parameter(param.detach().to("late")) for param in params_of(shapes, *dtypes)]
    return make_adamw(params, device, device_budget=budget, sub_group_size=65536, **more), params


def take_steps(optimizer, params, shapes, numbers, dtypes=DTYPES):
    """With gradients from the number of the step."""
    for number in numbers:
        host = params_of(shapes, *dtypes)
        set_grads(host, number)
        for parameter, twin in zip(params, host, strict=True):
            parameter.grad = twin.grad.to(parameter.device)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in params], optimizer.state_dict()["state"]


SHAPES = [(700,), (3 * BLOCK + 5,), (257, 300)]


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_state_dicts_go_from_any_mix_to_any_other(make_adamw, late, there):
    """Saved by one and loaded by the other: the same bits, then and in the next step."""
    host = params_of(SHAPES, *DTYPES)
    mixed, params = on_device(make_adamw, SHAPES, device="nvme", budget="2MiB")
    plain = make_adamw(host, "cpu")
    source, target = ((mixed, params), (plain, host)) if there else ((plain, host), (mixed, params))
    take_steps(*source, SHAPES, range(2))
    saved = source[0].state_dict()
    take_steps(*target, SHAPES, [7])
    with torch.no_grad():
        for parameter, twin in zip(target[1], source[1], strict=True):
            parameter.copy_(twin)
    target[0].load_state_dict(saved)
    assert_same_bits(target[0].state_dict()["state"], saved["state"])
    assert_same_bits(take_steps(*target, SHAPES, [2, 3]), take_steps(*source, SHAPES, [2, 3]))
    assert 0 < mixed.stats().device_state_bytes < mixed.stats().state_bytes


def test_weights_that_somebody_changed_count_as_on_the_cpu(make_adamw, late):
    dtypes, counted, found = (torch.bfloat16, torch.float16, torch.float32), [], []
    mixed, params = on_device(make_adamw, SHAPES)
    host = params_of(SHAPES, *dtypes)
    for optimizer, its_params in ((mixed, params), (make_adamw(host, "cpu"), host)):
        take_steps(optimizer, its_params, SHAPES, [0])
        its_params[0].data[3] = 0.25
        its_params[1].data[[5, 2 * BLOCK]] = -0.5
        before = optimizer.state_dict()["state"]
        with pytest.warns(RuntimeWarning, match="3 tiles of 65536 elements were changed"):
            found.append((before, take_steps(optimizer, its_params, SHAPES, [1, 2])))
        counted.append(optimizer.stats().resplit_blocks)
    assert counted == [3, 3]
    assert_same_bits(*found)


def test_the_host_waits_no_more_for_more_subgroups(make_adamw, late):
    """Once for the norm, and once for what was found changed."""
    counted = []
    for blocks in (1, 4):
        optimizer, params = on_device(make_adamw, [(blocks * BLOCK,)], DTYPES[:1], clip=1.0)
        grad = params_of([(blocks * BLOCK,)], torch.bfloat16)[0].detach()
        for _ in range(2):
            params[0].grad = grad.to("late")
            late.waits.clear()
            optimizer.step()
        counted.append(late.waits.total())
        assert not optimizer.store.mirror.size_bytes
    assert counted == [2, 2]


def test_gradients_that_have_left_the_device_come_back(make_adamw, late):
    """As with `offload_gradients`: the update takes them from the host."""
    rule, pool = CASES[0].rule, KernelPool(1)
    param, lower, states = weights(torch.bfloat16, rule, pool)
    there = [tensor.to("late") for tensor in (param, lower, *states)]
    scalars, grad = StepScalars(rule.scalars(CASES[0].settings, 1), 0.5), gradient(1, torch.bfloat16)
    for tensors in ((param, lower, states), (there[0], there[1], there[2:])):
        run = RunTensors(tensors[0], grad, tensors[1], tensors[2], THERE.tile_checksums(tensors[0]), scalars)
        update_run(rule.update, run, THERE)
    assert torch.equal(there[0].cpu().view(torch.int16), param.view(torch.int16))
    assert torch.equal(there[1].cpu().view(torch.int16), lower.view(torch.int16))


def test_whole_matrices_stay_with_the_host(late):
    matrix, rest = (torch.nn.Parameter(torch.randn(shape).to("late")) for shape in ((64, 64), (64,)))
    section = {"device_budget": "1GiB", "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    groups = [{"params": [matrix]}, {"params": [rest], "rule": "AdamW"}]
    with OffloadMuon(groups, offload=section) as optimizer:
        optimizer.place()
        assert [slot.home.on_device for slot in optimizer.store.slots] == [False, True]
        assert 0 < optimizer.stats().device_state_bytes < optimizer.stats().host_state_bytes


def test_where_it_cannot_be_it_is_refused(make_adamw):
    optimizer = make_adamw(params_of([(100,)], torch.bfloat16), "cpu", device_budget="1GiB")
    with pytest.raises(ConfigError, match=r"device_budget = 1 GiB: the parameters are on the CPU"):
        optimizer.place()
    drive = {"device": "nvme", "nvme_path": "."}
    for more, words in (
        ({"offload_param": drive}, 'offload_param.device = "nvme" takes it from there'),
        ({"offload_optimizer": {**drive, "durable": True}}, "a durable run writes all of it"),
    ):
        with pytest.raises(ConfigError, match=words):
            OffloadConfig.from_dict({"zero_optimization": {"stage": 3, **more}, "device_budget": "1GiB"})


MAX_OPERATORS, FOR_ALL = 12, 3  # for one gradient of at most 16 Mi elements, and for all of them together


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def operators_of(numels):
    grads = {index: torch.empty(numel, dtype=torch.bfloat16, device="late") for index, numel in enumerate(numels)}
    with Counting() as counting:
        sums_from_device(grads, lambda device: None)
    return counting.operators


def test_operators_grow_with_the_number_of_gradients_and_not_with_their_size(late):
    assert operators_of([3 * BLOCK + 7]) == operators_of([30 * BLOCK + 7]) <= MAX_OPERATORS + FOR_ALL
    assert operators_of([BLOCK + 1] * 20) <= 20 * MAX_OPERATORS + FOR_ALL


@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 300 * BLOCK + 5])
def test_the_sums_are_those_of_the_cpu(late, numel):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()
    found = sums_from_device({4: grad.to("late"), 5: grad}, lambda device: None)
    torch.testing.assert_close(found.pop(4), KernelPool(1).tile_sq_sums(grad), rtol=1e-13, atol=0)
    assert not found  # those in host memory are not the device's


def test_the_host_waits_once_for_the_norm_and_once_for_each_subgroup(make_adamw, late):
    counted = []
    for num_params in (3, 12):
        params = params_of([(BLOCK,)] * num_params, torch.bfloat16)
        there = [torch.nn.Parameter(p.detach().to("late")) for p in params]
        optimizer = make_adamw(there, "cpu", clip=1.0, sub_group_size=BLOCK)
        for step in range(3):
            set_grads(params, step)
            for parameter, twin in zip(there, params, strict=True):
                parameter.grad = twin.grad.to("late")
            late.waits.clear()
            optimizer.step()
            if step:  # in the first, state is born of what is there
                counted.append(late.waits.total() - num_params)
    assert counted == [1] * 4


def test_waiting_for_a_device_is_not_computing(make_adamw, late):
    [host] = params_of([(4 * BLOCK,)], torch.bfloat16)
    there = torch.nn.Parameter(host.detach().to("late"))
    optimizer = make_adamw([there], "cpu", sub_group_size=BLOCK)
    for step in range(2):
        set_grads([host], step)
        there.grad = host.grad.to("late")
        optimizer.step()
    iteration, timeline = optimizer.stats().iteration, optimizer.timeline()
    assert iteration.wait_seconds["device"] > 0
    waits = [span for span in timeline if span.kind == "wait"]
    computes = [span for span in timeline if span.kind in ("compute", "norm")]
    assert len(waits) == 5
    assert not any(one.start_ns < other.end_ns and other.start_ns < one.end_ns for one in waits for other in computes)

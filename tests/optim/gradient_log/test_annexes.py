"""Staging buffers of a run with a log share what they have for a while only: more state stays, and the bits too."""

import contextlib
import warnings

import pytest
import torch

from nvme_offload import OffloadAdamW
from nvme_offload.aio_native import Op
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.host.annexed_pool import AnnexedPool
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.state.slots import Residency
from tests.support.failing_drive import Failing
from tests.support.interrupts import Struck, every, raise_struck, send_sigint
from tests.support.killed_steps import ANNEXED, durable_section
from tests.support.logged_pair import ADAMW
from tests.support.training import assert_same_bits, params_of, section, set_grads, snapshot

BF16 = (torch.bfloat16,)
FOUR = {**ANNEXED, "buffers": 4}


def annexed(optimizer):
    pool = optimizer.store.pool
    assert isinstance(pool, AnnexedPool)
    return pool


@pytest.fixture
def optimizer(drive):
    params = params_of([(TILE_NUMEL,)] * 12, *BF16)
    with OffloadAdamW(params, offload=durable_section(drive, "run", rewrite_every=3, **FOUR)) as optimizer:
        yield optimizer


def step(optimizer, number):
    set_grads(optimizer.param_groups[0]["params"], number)
    optimizer.step()
    optimizer.synchronize()


def test_five_subgroups_stay_in_the_memory_of_four(optimizer):
    for number in range(12):
        step(optimizer, number)
        read = {span.subgroup for span in optimizer.timeline() if span.kind == "read"}
        if number > 4:
            assert len(read) == 7
    pool = annexed(optimizer)
    [whole] = {optimizer.store.sealing.buffer_bytes(slot.subgroup) for slot in optimizer.store.slots}
    assert pool.num_buffers == 5
    assert pool.size_bytes <= 4 * (whole + 4096)
    assert optimizer.store.staging_bytes == pool.size_bytes
    assert pool.num_free == 0
    assert pool.annexes.num_free == pool.annexes.num_buffers, "what stays is the state alone"


@pytest.mark.parametrize(
    ("period", "more"),
    [(3, {"dtypes": BF16}), (8, {}), (3, {"dtypes": BF16, "host_budget": "9MiB"}), (8, {"checksums": True})],
    ids=str,
)
def test_the_bits_are_those_of_a_training_in_place(pairs, period, more):
    pair = pairs(ADAMW, period, seed=period, **{**ANNEXED, **more})
    for number in range(9):
        pair.step()
        if number == 6:
            pair.reopen()
    pair.check()
    annexed(pair.logged)
    assert pair.chains
    assert pair.logged.stats().failed_commits == 0


@pytest.mark.parametrize("first", [1, 4, 10])
def test_what_the_drive_did_not_take_is_kept_with_the_annex_that_it_is_in(pairs, monkeypatch, first):
    pair = pairs(ADAMW, 3, seed=1, dtypes=BF16, **FOUR)
    for _ in range(3):
        pair.plain_step()
    pair.logged.synchronize()
    annexed(pair.logged)
    failing = Failing(pair.logged.store.tier, monkeypatch, Op.WRITE, first=first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair.plain_step(by=pair.step_and_wait_on_a_drive_that_fails)
        if not pair.logged.has_unfinished_step:
            pair.check()  # a drive that takes no writes keeps nobody from what is in memory
        failing.healthy = True
        if pair.logged.has_unfinished_step:
            pair.logged.finish_step()
        pair.logged.commits.settle()
    pair.plain_step()
    pair.check()
    pair.reopen()
    pair.check()


def test_who_has_a_body_gets_the_annexes_of_those_that_were_read_for_another_order(optimizer):
    for number in range(4):
        step(optimizer, number)
    pipeline, slots = optimizer.store.pipeline, optimizer.store.slots
    staged = [slot for slot in slots if slot.buffer is not None]
    others = [slot for slot in slots if slot.buffer is None][: annexed(optimizer).num_whole]
    window = [*others, *staged[len(others) :]]
    pipeline.read_into_free_buffers(window, 0)
    while not pipeline.is_quiet:
        pipeline.advance([])
    assert annexed(optimizer).annexes.num_free < 3
    [last] = [slot for slot in staged if slot.buffer is not None][-1:]
    pipeline.acquire([last, *others], 0, replay=False)
    assert last.has_all_of_buffer
    pipeline.release(last)
    assert last.residency is Residency.STAGED
    step(optimizer, 4)


def test_what_is_read_before_the_next_step_is_no_more_than_can_be_whole(optimizer):
    step(optimizer, 0)
    pool = annexed(optimizer)
    assert len(optimizer.store.pipeline.window(optimizer.store.slots)) == pool.num_whole == 2


def test_parameters_whose_updates_wait_for_a_forward_are_read_ahead_in_whole_buffers(drive):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 255) for _ in range(2))).bfloat16()
    its = durable_section(drive, "run", rewrite_every=3, **ANNEXED)
    with OffloadAdamW(model.parameters(), offload=its) as optimizer:
        optimizer.overlap_with(model)
        set_grads([*model.parameters()], 0)
        optimizer.step()
        optimizer.synchronize()
        assert not isinstance(optimizer.store.pool, AnnexedPool)


def test_an_optimizer_that_is_told_later_overlaps_with_the_buffers_that_it_has(drive):
    models = [torch.nn.Sequential(*(torch.nn.Linear(255, 255) for _ in range(12))).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    sections = durable_section(drive, "run", rewrite_every=3, **ANNEXED), section(sub_group_size=65536, clip=1.0)
    with contextlib.ExitStack() as stack:
        later, plain = (
            stack.enter_context(OffloadAdamW(model.parameters(), offload=its))
            for model, its in zip(models, sections, strict=True)
        )
        for number in range(8):
            if number == 2:
                annexed(later)
                later.overlap_with(models[0], ["Linear"])
            for model, optimizer in zip(models, (later, plain), strict=True):
                set_grads([*model.parameters()], number)
                optimizer.step()
                with torch.no_grad():
                    model(torch.ones(2, 255, dtype=torch.bfloat16))
        assert_same_bits(snapshot(later), snapshot(plain))
        assert later.stats().updates_behind > 0


@pytest.mark.parametrize("stride", [797, pytest.param(13, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("strike", [raise_struck, send_sigint])
def test_a_step_that_is_cut_short_leaves_each_annex_with_one_owner(pairs, strike, stride):
    pair = pairs(ADAMW, 3, seed=2, dtypes=BF16, shapes=[(TILE_NUMEL,)] * 7, **FOUR)
    optimizer = pair.logged
    pair.plain_step()

    def step(interrupt):
        before = optimizer.stats().steps
        with contextlib.suppress(Struck, KeyboardInterrupt), interrupt:
            optimizer.step()
        if optimizer.has_unfinished_step:
            try:
                optimizer.finish_step()
            except StateError:  # struck in the kernel, of which nobody knows how far it got
                pair.load()
        elif optimizer.stats().steps == before:
            optimizer.step()

    for interrupt in every(stride, strike):
        pair.plain_step(by=lambda at=interrupt: step(at))
        check(pair, interrupt)


@pytest.mark.parametrize("stride", [797, pytest.param(13, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("read", ["state_dict", "synchronize"])
def test_a_reader_that_is_cut_short_changes_nothing(pairs, read, stride):
    pair = pairs(ADAMW, 3, seed=2, dtypes=BF16, shapes=[(TILE_NUMEL,)] * 7, **FOUR)
    for interrupt in every(stride, raise_struck):
        pair.plain_step()
        with contextlib.suppress(Struck), interrupt:
            getattr(pair.logged, read)()
        pair.plain_step()
        check(pair, interrupt)


def check(pair, interrupt):
    """The bits are those of the other training, and nobody has a buffer or an annex that is another's."""
    try:
        pair.check()
    except BaseException as error:
        error.add_note(f"struck at {interrupt.place}")
        raise
    pool, residents = annexed(pair.logged), pair.logged.store.pipeline.residents
    assert pool.num_free + len(residents) == pool.num_buffers, interrupt.place
    taken = [place for slot in residents for place in slot.buffer.places(0, slot.buffer.size_bytes)]
    assert len(set(taken)) == len(taken), interrupt.place
    pair.logged.synchronize()

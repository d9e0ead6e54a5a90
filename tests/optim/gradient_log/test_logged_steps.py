"""A durable run that is rewritten every few steps has the bits of one in place, whatever comes between."""

import contextlib
import warnings
from itertools import count

import pytest
import torch

from nvme_offload import ConfigWarning, CorruptionError, OffloadAdamW, ResumeError
from tests.support.failing_drive import Failing, Op, flip_bit
from tests.support.interrupts import STRIKES, Interrupt, every, raise_struck, strided, struck
from tests.support.killed_steps import durable_section
from tests.support.logged_pair import ADAMW
from tests.support.rules import CASES, IN_BF16
from tests.support.tiers import check_buffers, goes_on
from tests.support.training import BLOCK, assert_same_bits, noted, params_of, section, set_grads, snapshot, take_steps


def test_what_would_be_the_longest_to_read_stays_in_the_buffers(drive):
    params = params_of([(BLOCK,)] * 12, torch.bfloat16)
    with OffloadAdamW(params, offload=durable_section(drive, "run", rewrite_every=3, buffers=2)) as optimizer:
        extents = optimizer.durable.commits.run.extents
        others = []
        for step in range(12):
            due = {slot for slot in range(len(extents.slots)) if extents.num_logged_next(slot) == 0}
            take_steps(optimizer, params, step)
            optimizer.synchronize()
            read = {span.subgroup for span in optimizer.timeline() if span.kind == "read"}
            if step > 4:
                assert len(read) == 10
                others.append(set(range(12)) - read - due)
        # On a busy machine the write of one that is due can be done before that of one that is not, which then stays.
        assert sum(map(bool, others)) <= 2, others


OTHERS = [(ADAMW, 3, {"host_budget": "9MiB"}), (ADAMW, 3, {"checksums": True})]
OTHERS += [
    pytest.param(case, 3, {}, marks=pytest.mark.slow)  # test_replay.py has the bits of each rule
    for case in CASES
    if case.rule.kernel and case is not ADAMW
]


@pytest.mark.parametrize(
    ("case", "period", "more"), [(ADAMW, 2, {}), (ADAMW, 4, {}), (IN_BF16[0], 1, {}), *OTHERS], ids=str
)
def test_the_bits_are_those_of_a_training_in_place(pairs, case, period, more):
    pair = pairs(case, period, seed=period, **more)
    for number in range(8):
        pair.step()
        if number in (3, 5):
            pair.reopen()
        if number % 3 == 0 or number == 7:
            pair.check()
    assert pair.logged.stats().failed_commits == 0


def test_what_is_written_is_that_of_the_period(drive):
    written = {}
    for period in (1, 2, 4):
        params = params_of([(4 * BLOCK,)] * 2, torch.bfloat16)
        with OffloadAdamW(params, offload=durable_section(drive, f"p{period}", rewrite_every=period)) as optimizer:
            before = 0
            for step in range(2 * period + 1):
                take_steps(optimizer, params, step)
                optimizer.synchronize()
                before = before or optimizer.stats().bytes_written
            moved = optimizer.stats().bytes_written - before
            written[period] = moved / (2 * period) / (8 * BLOCK)
    assert written == pytest.approx({1: 12, 2: 7, 4: 4.5}, rel=0.06)


def test_an_entry_without_room_for_what_was_changed_by_hand_becomes_a_base(pairs):
    pair = pairs(ADAMW, 4, seed=9)
    for step in range(4):
        pair.set_by_hand(0, 0.125 * step, size=2 * BLOCK)
        pair.plain_step()
    pair.check()
    assert pair.chains, "others are logged"
    assert all(not record.current.log for record in pair.logged.store.durability.run.extents.slots[:2])
    pair.reopen()
    pair.check()


def test_a_parameter_without_a_gradient_that_was_changed_is_whole_where_its_subgroup_is_rewritten(pairs):
    pair = pairs(ADAMW, 1, seed=3, shapes=[(300,), (5,), (400,)])
    pair.plain_step()
    pair.set_by_hand(2, 0.3, size=100)
    pair.plain_step(without=[2])
    pair.reopen()
    pair.plain_step()
    pair.check()


def test_wider_gradients_than_expected_are_not_logged(drive):
    def made(where):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 70_000).bfloat16())
        param.grad_dtype = None
        return param, OffloadAdamW([param], offload=where)

    one, other = made(section(sub_group_size=65536, clip=1.0)), made(durable_section(drive, "run", rewrite_every=3))
    with one[1], other[1]:
        for step in range(4):
            for param, optimizer in (one, other):
                param.grad = torch.randn(70_000, generator=torch.Generator().manual_seed(step)) * 0.1
                optimizer.step()
        assert_same_bits(snapshot(one[1]), snapshot(other[1]))
        assert [len(record.current.log) for record in other[1].store.durability.run.extents.slots] == [0, 0]


def test_going_back_one_step_gives_the_bits_of_the_step_before_and_of_what_follows(pairs):
    pair = pairs(ADAMW, 3, seed=4)
    for number in range(7):
        pair.step()
        if number > 2:
            pair.go_back()
            pair.step()
            pair.check()


def flip(optimizer, extent, at):
    [stripe, *_] = extent.stripes
    flip_bit(optimizer.store.durability.run.space.path_of(stripe.fd), stripe.offset + at)


@pytest.mark.filterwarnings("ignore:a committed step is damaged")
@pytest.mark.parametrize("at", [0, 2000])
def test_where_the_newest_entry_is_damaged_the_step_before_is_taken(pairs, at):
    pair = pairs(ADAMW, 3, seed=2)
    for _ in range(3):
        pair.plain_step()
    pair.logged.durable.commits.settle()
    newest = pair.logged.store.durability.run.extents.sequence - 1
    entry = next(chain.log[-1] for chain in pair.chains if chain.log[-1].sealed_as.sequence == newest)
    flip(pair.logged, entry.extent, at)
    pair.number -= 1
    pair.reopen()
    assert_same_bits(snapshot(pair.logged), pair.before)


@pytest.mark.filterwarnings("ignore:a committed step is damaged")
def test_where_an_older_entry_is_damaged_it_is_refused_by_name(pairs):
    pair = pairs(ADAMW, 4, seed=2)
    for _ in range(4):
        pair.plain_step()
    pair.logged.durable.commits.settle()
    chain = next(chain for chain in pair.chains if len(chain.log) > 1)
    flip(pair.logged, chain.log[0].extent, 2000)
    with pytest.raises(ResumeError, match=r"step 4: .*the log of subgroup \d"):
        pair.reopen()


def test_a_step_does_not_replay_an_entry_of_another_write(drive):
    params = params_of([(BLOCK,)] * 4, torch.bfloat16)
    with OffloadAdamW(params, offload=durable_section(drive, "run", rewrite_every=4, buffers=2)) as optimizer:
        take_steps(optimizer, params, *range(2))
        optimizer.durable.commits.settle()
        slot = next(slot for slot in optimizer.store.slots if slot.log.num_logged and slot.buffer is None)
        entry = optimizer.store.durability.run.extents.slots[slot.index].current.log[0]
        flip(optimizer, entry.extent, entry.content.trailer_at + 20)
        set_grads(params, 2)
        with pytest.raises(CorruptionError, match=f"the log of slot {slot.index}"):
            optimizer.step()


@pytest.mark.parametrize("first", [1, 2, 5])
def test_an_entry_that_the_drive_did_not_take_is_written_once(pairs, monkeypatch, first):
    pair = pairs(ADAMW, 4, seed=1)
    pair.plain_step()
    pair.logged.synchronize()
    failing = Failing(pair.logged.store.tier, monkeypatch, Op.WRITE, first=first)
    with warnings.catch_warnings(action="ignore"):
        pair.plain_step(by=pair.step_and_wait_on_a_drive_that_fails)
        assert failing.left <= 0
        failing.healthy = True
        if pair.logged.has_unfinished_step:
            pair.logged.finish_step()
        pair.logged.durable.commits.settle()
    pair.plain_step()
    pair.check()
    pair.reopen()
    pair.check()


@pytest.mark.parametrize("period", [1, 4])
def test_what_is_changed_after_the_drive_did_not_take_a_write_is_not_in_it(pairs, monkeypatch, period):
    pair = pairs(ADAMW, period, seed=1, shapes=[(300,)])
    pair.plain_step()
    pair.logged.durable.commits.settle()
    failing = Failing(pair.logged.store.tier, monkeypatch, Op.WRITE)
    pair.plain_step()
    with pytest.warns(RuntimeWarning, match="could not be committed"):
        pair.logged.durable.commits.settle()
    with contextlib.suppress(OSError):  # as the commit
        pair.logged.synchronize()
    failing.healthy = True
    with torch.no_grad():
        pair.params[0][:100] = 0.3
    pair.logged.zero_grad()
    pair.logged.step()  # commits what there is
    pair.number += 1
    pair.reopen()
    pair.check()


def test_auto_measures(drive):
    param = torch.nn.Parameter(torch.ones(300).bfloat16())
    with OffloadAdamW([param], offload=durable_section(drive, "run", rewrite_every="auto")) as optimizer:
        assert 1 <= optimizer.store.durability.logs.period <= 4
        assert optimizer.stats().bytes_written == 128 << 20, "of the measurement"


def test_a_section_that_logs_nothing_says_so(drive):
    param = torch.nn.Parameter(torch.ones(300))
    param.grad = torch.ones(300)
    optimizer = OffloadAdamW([param], offload=durable_section(drive, "run", rewrite_every=3))
    with optimizer, pytest.warns(ConfigWarning, match="rewrite_every = 3 is done as 1 here"):
        optimizer.step()


def test_a_run_goes_on_with_the_period_that_it_began_with(drive):
    params = params_of([(300,)], torch.bfloat16)
    with OffloadAdamW(params, offload=durable_section(drive, "run", rewrite_every=3)) as optimizer:
        take_steps(optimizer, params, 0)
    optimizer = OffloadAdamW(params, offload=durable_section(drive, "run", rewrite_every=2))
    with optimizer, pytest.raises(ResumeError, match="rewrite_every: 3 was committed, 2 is here"):
        optimizer.resume()


@pytest.fixture
def pair(pairs):
    pair = pairs(ADAMW, 3, seed=2, dtypes=(torch.bfloat16,), shapes=[(BLOCK,)] * 7, buffers=4)
    pair.plain_step()
    return pair


@STRIKES
@strided(1597)
def test_a_step_that_is_cut_short_is_finished_and_logged_once(pair, strike, stride):
    optimizer = pair.logged

    def step(interrupt):
        before = optimizer.stats().steps
        struck(interrupt, optimizer.step)
        if not goes_on(optimizer, before):  # struck in the kernel, of which nobody knows how far it got
            pair.load()

    for interrupt in every(stride, strike):
        pair.plain_step(by=lambda at=interrupt: step(at))
        check(pair, interrupt)


@strided(1597)
@pytest.mark.parametrize("read", ["state_dict", "synchronize"])
def test_a_reader_that_is_cut_short_changes_nothing(pair, read, stride):
    for interrupt in every(stride, raise_struck):
        pair.plain_step()
        struck(interrupt, getattr(pair.logged, read))
        pair.plain_step()
        check(pair, interrupt)


def test_a_log_is_not_done_twice_by_who_reads_again(pair):
    """Struck when the kernel has done it, and nobody has noted that."""
    for number in count():
        pair.plain_step()
        interrupt = Interrupt(after_the_kernel(number), raise_struck)
        struck(interrupt, pair.logged.state_dict)
        if not interrupt.place:
            break
        check(pair, interrupt)
    assert number > 1, "subgroups"


def after_the_kernel(number):
    """Say of a point whether the kernel has just updated a subgroup, after so many others."""
    passed = count()
    return lambda point: (
        point.code.co_qualname == "KernelPool.update" and "CALL" in point.opcode and next(passed) == number
    )


def check(pair, interrupt):
    """The bits are those of the other training, and each buffer is free or has one owner."""
    with noted(f"struck at {interrupt.place}"):
        pair.check()
    check_buffers(pair.logged, interrupt.place)
    pair.logged.synchronize()

"""An exception between any two instructions of the optimizer: right bits or a refusal, each buffer with one owner."""

import gc
import os
import signal
from functools import partial
from itertools import islice

import pytest
import torch

from nvme_offload import OffloadAdamW, StateError
from nvme_offload.offload.weights.staging import HiddenFolder
from tests.support.interrupts import STRIKES, Interrupt, Struck, every, raise_struck, strided, struck
from tests.support.own_resources import Resources
from tests.support.tiers import check_buffers, goes_on
from tests.support.training import (
    BLOCK,
    SETTINGS,
    assert_same_training,
    noted,
    params_of,
    section,
    set_grads,
    take_steps,
)

SHAPES = [(2 * BLOCK,), (BLOCK,), (BLOCK,)]
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


IN_THE_KERNEL = tuple(
    f"({name}, after {opcode})"
    for name in ("read_update_write", "<lambda>", "<listcomp>", "update")
    for opcode in ("CALL", "RESUME")
)
"""Where alone a handler that raises leaves a step that cannot be finished: nobody knows how far the kernel got."""


class Pair:
    """An optimizer whose state is on NVMe, and one that nobody disturbs."""

    def __init__(self, make_adamw, steps=2):
        self.params, self.twins = params_of(SHAPES, *DTYPES), params_of(SHAPES, *DTYPES)
        self.optimizer = make_adamw(self.params, clip=1.0, buffers=2, sub_group_size=BLOCK)
        self.twin = make_adamw(self.twins, "cpu", clip=1.0, sub_group_size=BLOCK)
        self.steps = 0
        for _ in range(steps):
            self.step()

    def set_grads(self):
        set_grads(self.params, self.steps % 4)
        set_grads(self.twins, self.steps % 4)
        self.steps += 1

    def step(self):
        self.set_grads()
        self.optimizer.step()
        self.twin.step()

    def load(self):
        checkpoint = self.twin.state_dict()
        self.optimizer.load_state_dict(checkpoint)
        for param, twin in zip(self.params, self.twins, strict=True):
            param.data.copy_(twin.data)
        self.optimizer.load_state_dict(checkpoint)

    def check(self, place):
        """Everything agrees after one more step, which uses whatever the interrupt left behind."""
        with noted(f"struck at {place}"):
            self.step()
            assert_same_training(self.optimizer, self.twin)
        check_buffers(self.optimizer, place)


READERS = {
    "state_dict": lambda pair: pair.optimizer.state_dict(),
    "entry": lambda pair: pair.optimizer.state[pair.params[1]]["exp_avg"],
    "synchronize": lambda pair: pair.optimizer.synchronize(),
}


@STRIKES
@strided(431)
@pytest.mark.parametrize("name", READERS)
def test_what_only_reads_changes_nothing(make_adamw, name, strike, stride):
    pair = Pair(make_adamw)
    for interrupt in every(stride, strike):
        pair.step()
        struck(interrupt, lambda: READERS[name](pair))
        pair.check(interrupt.place)


@STRIKES
@strided(431)
def test_a_step_is_finished_repeated_or_refused(make_adamw, strike, stride):
    """And the note of whatever came out of it is true; see docs/hazards.md."""
    pair = Pair(make_adamw)
    for interrupt in every(stride, strike):
        cut_off(pair, interrupt, strike)
        pair.check(interrupt.place)


@STRIKES
@strided(1009)
def test_so_is_the_first_step_which_gives_the_state_its_place(make_adamw, strike, stride):
    for interrupt in every(stride, strike):
        pair = Pair(make_adamw, steps=0)
        cut_off(pair, interrupt, strike)
        pair.check(interrupt.place)
        pair.optimizer.close()
        pair.twin.close()


def cut_off(pair, interrupt, strike):
    """Cut a step short, and go on as its note says."""
    optimizer = pair.optimizer
    pair.set_grads()
    pair.twin.step()
    before = optimizer.stats().steps
    error = struck(interrupt, optimizer.step)
    if error is not None:
        said(optimizer, error, before, strike)
    if not goes_on(optimizer, before):
        assert strike is raise_struck, "Ctrl-C is held back where a step could not be finished"
        assert interrupt.place.endswith(IN_THE_KERNEL), interrupt.place
        pair.load()


def said(optimizer, error, before, strike):
    (note,) = getattr(error, "__notes__", [""])
    halfway, complete = optimizer.has_unfinished_step, optimizer.stats().steps > before
    if not note:  # before the call had begun, or after it
        assert not halfway
    elif halfway:
        assert f"step {before + 1} stopped after" in note
        assert ("finish_step()" in note) or strike is raise_struck
    else:
        assert note.startswith(
            f"Step {before + 1} is complete" if complete else f"Step {before + 1} has updated nothing"
        )


def test_the_handler_that_a_cut_off_step_left_is_found_by_the_next_one(make_adamw):
    """Whoever asks for it meanwhile finds ours; a SIGINT goes where it belongs."""
    pair = Pair(make_adamw)
    pair.set_grads()
    pair.twin.step()
    at_exit = Interrupt(lambda point: point.code.co_qualname == "DeferredInterrupt.__exit__", raise_struck)
    assert struck(at_exit, pair.optimizer.step) is not None
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    pair.check("the way out of a step")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@STRIKES
@strided(431)
def test_finishing_can_be_cut_short_too(make_adamw, monkeypatch, strike, stride):
    pair = Pair(make_adamw)
    for interrupt in every(stride, strike):
        optimizer = pair.optimizer
        pair.set_grads()
        pair.twin.step()
        advance = optimizer.store.blocks.advance
        with monkeypatch.context() as patch:
            patch.setattr(optimizer.store.blocks, "advance", raise_struck)
            with pytest.raises(Struck):
                optimizer.step()
        assert optimizer.store.blocks.advance == advance
        assert optimizer.has_unfinished_step
        struck(interrupt, optimizer.finish_step)
        if not goes_on(optimizer, None):
            assert strike is raise_struck
            pair.load()
        pair.check(interrupt.place)


WRITERS = {
    "load_state_dict": lambda pair, value: pair.optimizer.load_state_dict(value),
    "entry": lambda pair, value: pair.optimizer.state[pair.params[0]].__setitem__("exp_avg", value),
}


@STRIKES
@strided(797)
@pytest.mark.parametrize("name", WRITERS)
def test_what_writes_is_done_undone_or_refused_until_a_load(make_adamw, name, strike, stride):
    pair = Pair(make_adamw)
    for interrupt in every(stride, strike):
        pair.step()
        checkpoint = pair.twin.state_dict()
        value = checkpoint if name == "load_state_dict" else checkpoint["state"][0]["exp_avg"].clone()
        struck(interrupt, lambda value=value: WRITERS[name](pair, value))
        if pair.optimizer.has_unfinished_step:
            with pytest.raises(StateError, match="a load stopped halfway"):
                pair.optimizer.step()
            pair.load()
        pair.check(interrupt.place)


@STRIKES
@strided(613)
def test_a_group_is_added_or_not(make_adamw, strike, stride):
    for interrupt in every(stride, strike):
        pair = Pair(make_adamw)
        late, late_twin = (params_of([(BLOCK,)], torch.bfloat16) for _ in range(2))
        struck(interrupt, lambda pair=pair, late=late: pair.optimizer.add_param_group({"params": late}))
        if len(pair.optimizer.param_groups) == 1:
            pair.optimizer.add_param_group({"params": late})
        pair.twin.add_param_group({"params": late_twin})
        pair.params += late
        pair.twins += late_twin
        pair.check(interrupt.place)
        pair.optimizer.close()
        pair.twin.close()


@STRIKES
@strided(431)
def test_a_constructor_that_was_cut_short_leaves_nothing(tmp_path, strike, stride):
    """No thread, no descriptor and no directory; and nobody is locked out."""
    params = params_of([(64,), (9,)], torch.bfloat16, torch.float32)
    options = section(tmp_path, engine="aiofiles", queue_depth=1)

    def construct():
        made.append(OffloadAdamW(params, offload=options, **SETTINGS))

    made = []
    construct()
    made.pop().close()
    before = Resources.steady()
    for interrupt in every(stride, strike):
        error = struck(interrupt, construct)
        assert error is not None or not interrupt.place or made
        while made:
            made.pop().close()
        del error
        interrupt.kept = None
        gc.collect()
        assert not os.listdir(tmp_path), interrupt.place
    assert not Resources.settled(before).beyond(before)


SMALL, HALF_AND_FULL = [(9,), (7,), (3,)], (torch.bfloat16, torch.float16, torch.float32)


def trained(make_adamw, device, *steps):
    params = params_of(SMALL, *HALF_AND_FULL)
    optimizer = make_adamw(params, device)
    take_steps(optimizer, params, *steps)
    return optimizer


def descriptors():
    names = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(name) for name in names if os.path.lexists(name))


def points(most):
    """The first ones, and all of them where there is time."""
    return pytest.mark.parametrize("most", [most, pytest.param(None, marks=pytest.mark.slow)])


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_close_that_was_cut_short_is_made_again(make_adamw, tmp_path, stride):
    trained(make_adamw, "nvme", 1).close()
    gc.collect()
    before = descriptors()
    for interrupt in every(stride, raise_struck):
        optimizer = trained(make_adamw, "nvme", 1)
        struck(interrupt, optimizer.close)
        optimizer.close()
        interrupt.kept = None  # its frames have what was being written
        assert descriptors() == before, interrupt.place


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one in a finalizer is told
@points(40)
def test_a_folder_of_an_export_is_not_kept_locked(tmp_path, most):
    for number, interrupt in enumerate(islice(every(1, raise_struck), most)):
        folder = tmp_path / str(number)
        folder.mkdir()
        struck(interrupt, partial(HiddenFolder, folder))
        interrupt.kept = None  # its frames have what was being made
        HiddenFolder(folder).remove()
        assert list(folder.iterdir()) == []

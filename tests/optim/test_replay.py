"""Updates done again from a log: the bits of the same updates done one after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from nvme_offload.optim.kernels import ABSENT, KernelPool, LoggedStep, make_logged_step
from nvme_offload.optim.layout.master import TILE_NUMEL, MasterForm, num_tiles
from nvme_offload.optim.updates.work import StepScalars
from tests.support.kernel_twins import POOLS, State, Twin, awkward, flushed_denormals, same_bits, scalars_at
from tests.support.pairs import each_value_once
from tests.support.rules import CASES, RuleCase

NUMEL = TILE_NUMEL + 4096 + 1001  # two tiles; the second is more than one strip
STEPS = 16
TILES = (slice(0, TILE_NUMEL), slice(TILE_NUMEL, NUMEL))


pytestmark = pytest.mark.usefixtures("one_thread")


def empty_entry(size_bytes: int) -> torch.Tensor:
    memory = torch.empty(size_bytes + 64, dtype=torch.uint8)
    skipped = -memory.data_ptr() % 64
    return memory[skipped : skipped + size_bytes]


@dataclass
class Entry:
    """What `update_and_log` keeps of one step."""

    memory: torch.Tensor
    offsets: torch.Tensor
    grad_dtype: torch.dtype
    scalars: StepScalars

    @property
    def logged(self) -> LoggedStep:
        return make_logged_step(
            entry=self.memory,
            offsets=self.offsets,
            numel=NUMEL,
            grad_dtype=self.grad_dtype,
            scalars=self.scalars.of_kernel,
            grad_scale=self.scalars.grad_scale,
        )


def step_and_log(state: State, pool: KernelPool, grad: torch.Tensor, scalars: StepScalars) -> tuple[int, int, Entry]:
    """One step; how many tiles were found changed, the bytes that are kept, and those."""
    entry = Entry(empty_entry(8 * NUMEL), torch.empty(num_tiles(NUMEL), 2, dtype=torch.int64), grad.dtype, scalars)
    [changed], size_bytes = pool.update_and_log([state.segment(grad, scalars, offsets=entry.offsets)], entry.memory)
    return changed, size_bytes, entry


def replay(state: State, base: State, entries: list[Entry], pool: KernelPool, grad=None, scalars=None) -> int:
    """Do the logged steps on the state of `base`, and one with `grad` on the parameter as `state` has it now."""
    state.master, state.states = base.master, base.states
    log = [entry.logged for entry in entries]
    return state.update(pool, grad, scalars or scalars_at(1), log=log, base=base.param)


def scalars_of(case: RuleCase, step: int) -> StepScalars:
    """No two steps have the same."""
    return scalars_at(step, case, lr=1e-2 / step, maximize=step % 5 == 0)


def logged_run(case: RuleCase, form: MasterForm, grads: list[torch.Tensor], change: Callable | None = None):
    """The state at birth, the twin and the state after all steps, and the entries of the steps."""
    weights = (torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) * 0.02).numpy()
    twin, state = Twin(weights, form, case), State.of(weights, form, case)
    base, entries = state.copied(), []
    for step, grad in enumerate(grads, start=1):
        if change is not None:
            change(step, state, twin)
        scalars = scalars_of(case, step)
        twin.update(grad, scalars)
        entries.append(step_and_log(state, POOLS[step % len(POOLS)], grad, scalars)[-1])
    assert state.differs_from(twin) == []
    return base, twin, state, entries


def random_grads(dtype: torch.dtype, steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(NUMEL, generator=generator) * 0.01).to(dtype) for _ in range(steps)]


def set_by_hand(steps: tuple[int, ...]) -> Callable[[int, State, Twin], None]:
    """Before these steps somebody sets an element of the parameter, in its second tile."""

    def change(step: int, state: State, twin: Twin) -> None:
        if step in steps:
            state.param[TILE_NUMEL + 5000] = float(step)
            twin.master[TILES[1]] = state.param[TILES[1]].float().numpy()

    return change


@pytest.mark.parametrize(
    ("form", "grad_dtype"), each_value_once([*MasterForm], [torch.bfloat16, torch.float16, torch.float32]), ids=str
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_updates_have_the_bits_of_the_twin(case, form, grad_dtype):
    *logged, live = grads = random_grads(grad_dtype, STEPS if grad_dtype is torch.bfloat16 else 4)
    base, twin, state, entries = logged_run(case, form, grads, set_by_hand((3,)))
    for pool in POOLS:
        found = state.copied()
        assert replay(found, base.copied(), entries, pool) == 0
        assert found.differs_from(twin) == [], "replayed for a reader; the parameter is as the run left it"
    base, _, before, entries = logged_run(case, form, logged, set_by_hand((3,)))
    for pool in POOLS:
        found, scalars = before.copied(), scalars_of(case, len(grads))
        assert replay(found, base.copied(), entries, pool, live, scalars) == 0
        assert found.differs_from(twin) == [], f"replayed on the way to a step, {pool.isa}, {pool.num_threads} threads"
        assert torch.equal(found.checksums, pool.tile_checksums(found.param))


@pytest.mark.parametrize("num_logged", [1, 2, 3, STEPS - 1])
@pytest.mark.parametrize("form", [MasterForm.SPLIT, MasterForm.ITSELF])
def test_the_base_becomes_the_parameter_of_the_last_logged_step(form, num_logged):
    base, twin, _, entries = logged_run(CASES[0], form, random_grads(torch.bfloat16)[:num_logged], set_by_hand((1, 2)))
    for pool in POOLS:
        own = base.copied()
        segment = own.segment(None, scalars_at(1), log=[entry.logged for entry in entries], base=own.param)
        assert pool.update([segment]) == [0]
        assert own.differs_from(twin) == [], "the whole state from base and log alone, as after a crash"


@pytest.mark.parametrize(("form", "flush"), each_value_once([*MasterForm], [False, True]))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_bits_hold_for_awkward_numbers_and_under_flush_denormal(case, form, flush):
    dtypes = (torch.bfloat16, torch.float16, torch.bfloat16)
    grads = [awkward(NUMEL, seed=step).to(dtype) for step, dtype in enumerate(dtypes)]
    base, twin, state, entries = logged_run(case, form, grads)
    for pool in POOLS:
        found = state.copied()
        with flushed_denormals(flush):
            replay(found, base.copied(), entries, pool)
        assert found.differs_from(twin) == []


def test_a_parameter_set_by_hand_before_the_live_step_is_the_truth():
    *logged, live = random_grads(torch.bfloat16, 4)
    for form in MasterForm:
        base, twin, state, entries = logged_run(CASES[0], form, logged)
        set_by_hand((4,))(4, state, twin)
        twin.update(live, scalars_of(CASES[0], 4))
        for pool in POOLS:
            found = state.copied()
            assert replay(found, base.copied(), entries, pool, live, scalars_of(CASES[0], 4)) == 1
            assert found.differs_from(twin) == []


def test_a_gradient_of_zero_bits_takes_no_bytes_and_a_negative_zero_does():
    state, tile_bytes = State.of(np.ones(NUMEL, np.float32), MasterForm.SPLIT), 2 * TILE_NUMEL
    grad = torch.zeros(NUMEL, dtype=torch.bfloat16)
    for pool in POOLS:
        *_, size_bytes, entry = step_and_log(state, pool, grad, scalars_at(1))
        assert size_bytes == 0
        assert entry.offsets.unique().tolist() == [ABSENT]
        grad[TILE_NUMEL - 1] = -0.0
        *_, size_bytes, entry = step_and_log(state, pool, grad, scalars_at(2))
        assert size_bytes == tile_bytes
        assert entry.offsets.tolist() == [[0, ABSENT], [ABSENT, ABSENT]]
        assert same_bits(entry.memory[:tile_bytes].view(torch.bfloat16), grad[:TILE_NUMEL])
        grad.zero_()


def test_an_entry_of_zeros_alone_needs_no_memory():
    base, twin, _, [entry] = logged_run(CASES[0], MasterForm.SPLIT, [torch.zeros(NUMEL, dtype=torch.bfloat16)])
    entry.memory = torch.empty(0, dtype=torch.uint8)
    own = base.copied()
    POOLS[0].update([own.segment(None, scalars_at(1), log=[entry.logged], base=own.param)])
    assert own.differs_from(twin) == []


@pytest.mark.parametrize("form", MasterForm)
def test_tiles_of_zeros_replay_like_their_gradients(form):
    grads = random_grads(torch.bfloat16, 4)
    for step, tile in ((0, TILES[0]), (1, TILES[1]), (2, TILES[0])):
        grads[step][tile] = 0
    for case in CASES:
        base, twin, state, entries = logged_run(case, form, grads, set_by_hand((2,)))
        assert sum(int((entry.offsets[:, 0] == ABSENT).sum()) for entry in entries) == 3
        found = state.copied()
        replay(found, base.copied(), entries, POOLS[-1])
        assert found.differs_from(twin) == []


def test_an_entry_without_room_says_what_it_takes_and_the_step_is_done():
    weights, grad = np.linspace(-1, 1, NUMEL, dtype=np.float32), torch.full((NUMEL,), 0.5, dtype=torch.bfloat16)
    twin = Twin(weights, MasterForm.SPLIT)
    twin.update(grad, scalars_at(1))
    for pool in POOLS:
        state, offsets = State.of(weights, MasterForm.SPLIT), torch.empty(2, 2, dtype=torch.int64)
        guarded = empty_entry(TILE_NUMEL * 2 + 64).fill_(0xAB)
        segment = state.segment(grad, scalars_at(1), offsets=offsets)
        _, size_bytes = pool.update_and_log([segment], guarded[: TILE_NUMEL * 2])
        assert size_bytes >= 2 * NUMEL > TILE_NUMEL * 2
        assert guarded[TILE_NUMEL * 2 :].eq(0xAB).all(), "nothing behind the entry is touched"
        assert state.differs_from(twin) == []


@pytest.mark.parametrize("num_logged", [0, 2])
def test_sums_taken_on_the_way_are_those_of_what_is_there_when_all_is_updated(num_logged):
    # Three runs with gaps between them, so that blocks of sums begin and end anywhere in a tile and in a section.
    live, rounded = random_grads(torch.bfloat16)[-1], NUMEL + 23
    starts, padded = (0, rounded, 2 * rounded + 32), 3 * rounded + 64
    base, _, before, entries = logged_run(CASES[0], MasterForm.SPLIT, random_grads(torch.bfloat16)[:num_logged])
    itemsizes = (2, *(4 for _ in before.states))
    for pool in POOLS:
        state, tail = empty_entry(padded * sum(itemsizes)).fill_(7), empty_entry(padded * 2).fill_(7)
        runs, segments = [], []
        for start in starts:
            run, places, at = before.copied(), [], 0
            for itemsize, tensor in zip(itemsizes, (base.master, *base.states), strict=True):
                places.append(state[at + start * itemsize :][: NUMEL * itemsize].view(tensor.dtype))
                places[-1].copy_(tensor)
                at += padded * itemsize
            run.master, *run.states = places
            upper = tail[2 * start :][: 2 * NUMEL].view(torch.bfloat16)
            upper.copy_(base.param)
            runs.append((run, upper))
            log = [entry.logged for entry in entries]
            segments.append(run.segment(live, scalars_at(9), log=log, base=upper, tail=upper))
        words = [memory.view(torch.int32) for memory in (state, tail)]
        sums = [torch.zeros(num_tiles(part.numel()), dtype=torch.int64) for part in words]
        assert pool.update(segments, list(zip(words, sums, strict=True))) == [0, 0, 0]
        assert all(torch.equal(*pair) for pair in zip(sums, map(pool.tile_checksums, words), strict=True))
        alone = before.copied()
        replay(alone, base.copied(), entries, pool, live, scalars_at(9))
        for run, upper in runs:
            assert same_bits(upper, run.param)
            assert same_bits(run.param, alone.param)
            assert all(same_bits(*pair) for pair in zip(run.states, alone.states, strict=True))


@pytest.mark.parametrize("start", [0, 32, 128, TILE_NUMEL // 2])
def test_sums_of_many_tiles_in_a_row_are_those_of_what_is_there(start):
    # From where blocks of sums begin with a tile, within a stripe of a sum, between two stripes, and in half a tile.
    numel = 13 * TILE_NUMEL + 4096 + 77
    weights = np.random.default_rng(start).standard_normal(numel).astype(np.float32)
    for pool in POOLS:
        run, parts = State.of(weights, MasterForm.SPLIT), []
        for itemsize in (4, 2):
            memory = empty_entry((start + numel) * itemsize + 256).fill_(7)
            parts.append((memory, memory[start * itemsize :][: numel * itemsize]))
        run.states[0] = parts[0][1].view(torch.float32).zero_()
        tail = parts[1][1].view(torch.bfloat16)
        grad = torch.ones(numel, dtype=torch.bfloat16)
        words = [memory[: memory.numel() // 4 * 4].view(torch.int32) for memory, _ in parts]
        sums = [torch.zeros(num_tiles(part.numel()), dtype=torch.int64) for part in words]
        pool.update([run.segment(grad, scalars_at(1), tail=tail)], list(zip(words, sums, strict=True)))
        assert all(torch.equal(*pair) for pair in zip(sums, map(pool.tile_checksums, words), strict=True))
        assert same_bits(tail, run.param)


def test_several_segments_share_an_entry_and_one_without_a_gradient_has_no_part():
    grads = [*random_grads(torch.bfloat16, 2), None, torch.zeros(NUMEL, dtype=torch.float16)]
    entry = empty_entry(8 * NUMEL)
    for pool in POOLS:
        states = [State.of(np.ones(NUMEL, np.float32), MasterForm.SPLIT) for _ in grads]
        tables = [torch.full((2, 2), 77) for _ in grads]
        pairs = zip(states, grads, tables, strict=True)
        segments = [state.segment(grad, scalars_at(1), offsets=table) for state, grad, table in pairs]
        changed, size_bytes = pool.update_and_log(segments, entry)
        assert changed == [0, 0, 0, 0]
        offsets = torch.cat([table[:, 0] for table in tables[:2]])
        assert sorted(offsets.tolist())[0] == 0
        assert len(offsets.unique()) == 4
        assert size_bytes == sum(-(-2 * (tile.stop - tile.start) // 64) * 64 for tile in TILES) * 2
        assert tables[2].unique().tolist() == [77]
        assert tables[3].unique().tolist() == [ABSENT]
        for grad, table in zip(grads[:2], tables[:2], strict=True):
            for tile, at in zip(TILES, table[:, 0].tolist(), strict=True):
                kept = entry[at : at + 2 * (tile.stop - tile.start)].view(torch.bfloat16)
                assert same_bits(kept, grad[tile])


def test_what_cannot_be_a_log_is_refused_in_words():
    state = State.of(np.ones(NUMEL, np.float32), MasterForm.SPLIT)
    *_, entry = step_and_log(state, POOLS[0], random_grads(torch.bfloat16, 1)[0], scalars_at(1))
    good = {"entry": entry.memory, "offsets": entry.offsets, "numel": NUMEL, "grad_dtype": torch.bfloat16}
    good |= {"scalars": scalars_at(1).of_rule, "grad_scale": 1.0}
    bad = [
        ({"grad_dtype": torch.int8}, "grad_dtype is torch.int8"),
        ({"offsets": entry.offsets[:1]}, "offsets has 2 elements; it must have 4"),
        ({"entry": entry.memory.view(torch.int16)}, "entry is torch.int16; it must be torch.uint8"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            make_logged_step(**{**good, **change})
    logged = entry.logged
    for offset in (-2, 2**40, 2):
        entry.offsets[1, 0] = offset
        with pytest.raises(ValueError, match=f"offset {offset} of 10194 bytes is no place in an entry of {8 * NUMEL}"):
            POOLS[0].update([state.segment(None, scalars_at(1), log=[logged], base=state.param)])
    entry.offsets[1, 0] = ABSENT
    with pytest.raises(ValueError, match="base is a null address"):
        POOLS[0].update([state.segment(None, scalars_at(1), log=[logged])])
    for field, value, message in [
        ("scalars", [1.0], "AdamW takes 7 scalars, not 1"),
        ("grad_dtype", 3, "grad_dtype of a logged step is 3"),
        ("entry", entry.memory.data_ptr() + 2, "entry is not aligned to its 64-byte elements"),
        ("entry_bytes", 2 * TILE_NUMEL - 1, "offset 0 of 131072 bytes is no place in an entry of 131071"),
    ]:
        wrong = entry.logged
        setattr(wrong, field, value)
        with pytest.raises(ValueError, match=message):
            POOLS[0].update([state.segment(None, scalars_at(1), log=[wrong], base=state.param)])

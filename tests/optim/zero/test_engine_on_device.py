"""The engine around a model on a device: the losses, norms and bits of the CPU, wherever anything is kept."""

import itertools
import json
import math
import tempfile
from contextlib import nullcontext

import pytest

from tests.support.late_device.engine import WIDTH, trained_by_a_rank
from tests.support.late_device.mutations import (
    OF_ENGINES,
    OF_GRADIENTS,
    OF_PARAMETERS,
    OF_RANKS,
    OF_REFUSALS,
    OF_UPDATES_BEHIND,
)
from tests.support.ranks import run_ranks
from tests.support.training import run_child

IN_BACKWARD = ("backward", "speculate")
DRIVE = {"device": "nvme", "nvme_path": "DRIVE"}
LAYER_BYTES = (WIDTH + 1) * WIDTH * 4  # of a gradient in fp32


def section(gradients, state="cpu", accumulation=1, params="none", **more):
    return {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 65536,
            "offload_optimizer": DRIVE if state == "nvme" else {"device": "cpu"},
            "offload_param": DRIVE if params == "nvme" else {"device": params},
        },
        "offload_gradients": DRIVE if gradients == "nvme" else {"device": gradients},
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05,
        **more,
    }


BF16 = {"bf16": {"enabled": True}}
KEPT = {**DRIVE, "min_bytes": 0, "host_budget": "4KiB"}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1024.0}}
SECTIONS = {
    "host memory, bf16, added up": section("cpu", accumulation=2, **BF16),
    "nvme, fp32, added up": section("nvme", "nvme", 2),
    "nothing on the device, host memory": section("cpu", params="cpu", model={"meta": True}, **BF16),
    "block by block, nvme": section("nvme", "nvme", 3, "nvme", micro_batch_order="vertical", **BF16),
    "block by block, host memory": section("cpu", accumulation=2, micro_batch_order="vertical", **FP16),
    "too small a device": section("none", "nvme", **BF16, offload="auto", size_bytes=1 << 20),
    "activations on nvme": section("cpu", accumulation=2, **BF16, activations=KEPT | {"keep": "all"}),
    "nothing on the device, nvme": section("nvme", "nvme", 2, "nvme", model={"num_layers": 6, "tied": True}),
}


def behind(schedule, *arguments, gradients="none", **more):
    clips = {} if schedule == "forward" else {"gradient_clipping": 0.0, "skip_non_finite": False}
    return section(gradients, *arguments, overlap_step=schedule, **{"model": {"num_layers": 6}, **more}) | clips


MORE = {
    "boundaries on nvme, autocast": section(
        "nvme", "nvme", 2, "nvme", torch_autocast={"enabled": True, "dtype": "bfloat16"}, activations=KEPT
    ),
    "boundaries on nvme, block by block": section(
        "nvme", "nvme", 3, "nvme", micro_batch_order="vertical", activations=KEPT | {"keep": "boundaries"}, **BF16
    ),
    "nvme, bf16, two buffers": section("nvme", **BF16) | {"offload_gradients": {**DRIVE, "buffer_count": 2}},
    "nvme, fp16, added up, checksums": section("nvme", "nvme", 3, **FP16, aio={"checksums": True}),
    "nvme, with a budget": section("nvme", "nvme", 2, "nvme", **BF16, host_budget="24MiB"),
    "recomputed in backward": section("nvme", "nvme", 2, "nvme", model={"recomputed": True, "tied": True}, **BF16),
    "born on meta, tied": section("cpu", "nvme", 1, "nvme", model={"meta": True, "tied": True}, **FP16),
    "under autocast": section("cpu", "cpu", 2, "nvme", torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    "stage 2": section("cpu", params="cpu", **BF16)
    | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    "tied, recomputed, in backward": behind("backward", "nvme", 2, model={"tied": True, "recomputed": True}, **BF16),
    "a part of the state on the device": behind("forward", "nvme", device_budget="40KiB", **BF16),
    "nothing can be pinned": section("nvme", "nvme", 2, "cpu", refusals=1000, **BF16),
    "nvme, nothing pinned": section("nvme", accumulation=2, **BF16)
    | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
}


def trained(sections, mutation="", ranks=1):
    """Return what each section gives on the CPU and on the stand-in, on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        return [*itertools.chain(*run_ranks(trained_by_a_rank, ranks, sections, folder, mutation))]


def assert_all_same(results):
    for expected, found in results:
        assert_same(expected, found)


def assert_same(expected, found):
    assert found["losses"] == expected["losses"]
    assert found["digest"] == expected["digest"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12, nan_ok=True)


SIZES = {
    "host memory": [section("cpu", params="cpu", model={"num_layers": number}, **BF16) for number in (4, 8)],
    "nvme": [section("nvme", "nvme", 1, "nvme", model={"num_layers": number, "meta": True}) for number in (4, 8)],
}
SUBGROUPS = "backward, several subgroups"
BEHIND = {
    "forward": behind("forward", "nvme"),
    "backward": behind("backward", "nvme", 2, **BF16),
    SUBGROUPS: behind("backward", "nvme", model={"width": 256, "slow": True}, **BF16),
    "backward, the host far ahead": behind(
        "backward", model={"width": 256}, gradient_accumulation_steps=1, ahead=True, **BF16
    ),
    "forward, gradients in host memory": behind("forward", "nvme", gradients="cpu", **BF16),
}


@pytest.fixture(scope="module")
def results(once):
    """What all sections that are trained in every run give, by name; they share a process."""
    sections = (
        SECTIONS | BEHIND | {(name, place): each for name, sizes in SIZES.items() for place, each in enumerate(sizes)}
    )
    return once("engine_on_device", lambda _: dict(zip(sections, trained(list(sections.values())), strict=True)))


@pytest.mark.parametrize("name", SECTIONS)
def test_training_on_a_device_gives_the_bits_of_the_cpu(results, name):
    expected, found = results[name]
    assert_same(expected, found)
    assert found["norms"] == expected["norms"]  # the sums are the CPU's
    assert found["updates_behind"] > 0, "which is so where the section does not say otherwise"
    assert max(found["growth"], default=0) <= 8 + 2 * LAYER_BYTES  # a loss, and of all gradients the last two
    summed, landed, over = found["summed"], "all have landed", "step() is over"
    assert {*summed} - {landed, over} == {"nvme_offload: gradients"}, "threads that sum squares"
    assert {after for before, after in itertools.pairwise(summed) if before == landed} <= {over}, "none inside step()"


def assert_memory_is_flat(results, itemsize):
    """Also what the allocator cannot give to anybody yet counts."""
    assert_all_same(results)
    (_, few), (_, many) = results
    for found in (few, many):
        assert found["copies_where_it_computes"] == len(found["norms"]), "none but of what the model is given"
    # What 4 layers keep of 8 samples; two gradients more or less are on their way.
    activations = 4 * 8 * WIDTH * itemsize
    assert abs(many["peak_bytes"] - few["peak_bytes"] - activations) <= LAYER_BYTES // 2 * itemsize, "memory grows"
    return few, many


@pytest.mark.parametrize(("name", "itemsize"), [("host memory", 2), ("nvme", 4)])
def test_nothing_on_the_device_grows_with_the_model(results, name, itemsize):
    """With parameters, gradients and state elsewhere; activations do."""
    few, many = assert_memory_is_flat([results[name, place] for place in range(2)], itemsize)
    if name == "nvme":
        assert few["born_bytes"] == many["born_bytes"] == 0
    else:
        assert {*few["waits"], *many["waits"]} <= {0, 1}, "of the host, in every step, however many layers there are"


@pytest.mark.parametrize("schedule", BEHIND)
def test_updates_behind_a_step_and_in_backward_wait_for_the_norm_alone(results, schedule):
    expected, found = results[schedule]
    assert_same(expected, found)
    assert max(found["waits"]) <= (1 if schedule.startswith("forward") else 2), "in each step"
    if schedule.startswith("forward"):
        assert found["updates_behind"] > 0


def test_what_a_device_has_computed_is_updated_before_the_rest_is_waited_for(results):
    _, found = results["backward, the host far ahead"]
    first = found["worked"][: found["worked"].index("step")]
    assert "update" in first[:4], first  # of eight gradients


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["", *OF_RANKS])
def test_ranks_update_in_backward_what_another_stream_has_reduced(mutation):
    """And say so where they take it for computed on the stream that others compute on."""
    with pytest.raises(AssertionError) if mutation else nullcontext():
        assert_all_same(trained([BEHIND[SUBGROUPS]], mutation, ranks=2))


TIERS = [
    (state, params, gradients, period)
    for state, params, gradients in itertools.product(("device", "cpu", "nvme"), *[("none", "cpu", "nvme")] * 2)
    if state != "device" or params == "none"  # what of parameters leaves takes their state along
    for period in ((0, 1, 3) if state == "nvme" else (0,))
]
CASES = [
    (ranks, schedule, tiers)
    for ranks, schedule, tiers in itertools.product((1, 2), ("off", "forward", "backward", "speculate"), TIERS)
    if schedule != "speculate" or tiers[-1]  # what was guessed wrong is taken back from what a durable run has written
]
IN_EVERY_RUN = [
    (1, "off", ("cpu", "cpu", "nvme", 0)),
    (1, "backward", ("device", "none", "none", 0)),
    (1, "speculate", ("nvme", "none", "none", 1)),
    (2, "forward", ("nvme", "nvme", "cpu", 3)),
]
"""They have every value of each axis."""


def begins_in_backward(schedule, tiers):
    """With nothing between host and device that would come in its way."""
    return schedule in IN_BACKWARD and tiers[0] != "device" and tiers[1:3] == ("none", "none")


def case_of(schedule, tiers):
    """Precision and number of micro-batches go round, so that each comes to each value of an axis."""
    (state, params, gradients, period), number = tiers, TIERS.index(tiers)
    mode = (BF16, {}, BF16 if schedule == "backward" else FP16)[number % 3]
    chosen = section(gradients, state.replace("device", "cpu"), 1 + number % 2, params, overlap_step=schedule, **mode)
    if schedule in IN_BACKWARD:
        chosen["model"] = {"width": 256, "slow": begins_in_backward(schedule, tiers)}  # several subgroups
    if schedule == "backward":
        chosen |= {"gradient_clipping": 0.0, "skip_non_finite": False}
    if schedule == "speculate":  # two micro-batches have a smaller norm than one
        scales = [1, 1, 1, 300, 1, math.inf, 1] if begins_in_backward(schedule, tiers) else [1, 300, math.inf, 1]
        chosen |= {"gradient_clipping": 10.0 - 3 * (number % 2), "scales": scales}
    if state == "device":
        chosen["device_budget"] = "1GiB"
    if period:
        chosen["zero_optimization"]["offload_optimizer"] = {**DRIVE, "durable": True, "rewrite_every": period}
    return chosen


@pytest.mark.parametrize(
    ("ranks", "schedule", "tiers"),
    [pytest.param(*case, id=str(case), marks=() if case in IN_EVERY_RUN else pytest.mark.slow) for case in CASES],
)
def test_any_mix_of_tiers_schedules_and_ranks_has_the_bits_of_the_cpu(ranks, schedule, tiers):
    """State, parameters and gradients, each on any tier; 0, or after how many steps a durable run writes all anew."""
    state, _, gradients, _ = tiers
    results = trained([case_of(schedule, tiers)], ranks=ranks)
    assert_all_same(results)
    for _, found in results:
        assert (found["device_state_bytes"] > 0) == (state == "device")
        assert gradients != "none" or max(found["growth"]) > 4 * WIDTH * WIDTH * 2 / ranks, "there they are"
        begins = begins_in_backward(schedule, tiers)
        assert (found["updates_in_backward"] > 0) == begins
        assert (found["updates_taken_back"] > 0) == (begins and schedule == "speculate")
        assert found["skipped"] == (schedule == "speculate")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_mixes_of_tiers(name):
    assert_all_same(trained([MORE[name]]))


MUON = {"type": "Muon", "params": {"lr": 0.02}}
INSIDE = {"overlap_step": "off"}
SHORT_OF_MEMORY = {
    "nothing moved": section("none", **BF16, **INSIDE),
    "host memory": section("cpu", params="cpu", **BF16, **INSIDE),
    "nvme": section("nvme", "nvme", 1, "nvme", **INSIDE),
    "behind a step": section("none", "nvme", **BF16, overlap_step="forward"),
    "in backward": section("none", "nvme", gradient_clipping=0.0, skip_non_finite=False, overlap_step="backward"),
    "state on the device, bf16": section("none", **BF16, device_budget="1GiB", stride=7),
    "state on the device, fp16": section("cpu", **FP16, device_budget="1GiB", stride=5),
    "state on the device, fp32": section("none", device_budget="1GiB", stride=5),
    "whole matrices": section("none", "nvme", **BF16, optimizer=MUON, stride=3),
    "whole matrices, fp32": section("cpu", optimizer=MUON, stride=3),
    "activations": section("cpu", **BF16, activations=KEPT | {"keep": "all"}),
}


REFUSED_IN = {
    "an update that was refused memory is given up": "nothing moved",
    "an update that was refused memory begins anew": "behind a step",
    "state on the device is updated where it is": "state on the device, fp32",
    "matrices are updated where they are": "whole matrices, fp32",
    "a backward says that it failed when it is over": "host memory",
}


def assert_refusals_cost_nothing(name, mutation=""):
    code = "import json, sys; from tests.support.late_device.engine import short_of_memory; "
    code += "print(json.dumps(short_of_memory(json.loads(sys.argv[1]), sys.argv[2])))"
    result = json.loads(run_child(code, json.dumps(SHORT_OF_MEMORY[name]), mutation, timeout=280))
    assert result["found"] == result["expected"]
    assert result["refused"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT_OF_MEMORY)
def test_memory_that_is_refused_anywhere_but_in_backward_costs_nothing_but_that(name):
    """Allocations and copies, one after the other: of forwards, steps, and updates in backward and behind a step."""
    assert_refusals_cost_nothing(name)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_REFUSALS)
def test_a_mistake_where_memory_is_refused_is_found(mutation):
    with pytest.raises(AssertionError):
        assert_refusals_cost_nothing(REFUSED_IN[mutation], mutation)


@pytest.mark.slow
def test_copies_may_be_later_than_what_is_computed():
    sections = [SECTIONS["host memory, bf16, added up"], SECTIONS["nvme, fp32, added up"]]
    assert_all_same(trained(sections, "copies are later than what is computed"))


@pytest.mark.slow
def test_memory_that_grows_with_the_model_is_found():
    results = trained(SIZES["host memory"], "what a gradient had waits for the host")
    with pytest.raises(AssertionError, match="memory grows"):
        assert_memory_is_flat(results, 2)


EVERYWHERE = section("nvme", "nvme", 2, "nvme", model={"num_layers": 8}, **BF16)
FEW_BUFFERS = section("nvme", "nvme", 3, **BF16) | {"offload_gradients": {**DRIVE, "buffer_count": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [*OF_GRADIENTS, *OF_PARAMETERS])
def test_a_mistake_with_what_is_on_its_way_is_found(mutation):
    with pytest.raises(AssertionError):  # other numbers, or an assertion in the process that trains
        assert_same(*trained([FEW_BUFFERS if mutation in OF_GRADIENTS else EVERYWHERE], mutation)[0])


FOUND_IN = {
    "updates inside a step are not waited for": section("none", "nvme", 2, overlap_step="off"),
    "updates behind a step are not waited for by readers": BEHIND["forward"],
    "updates behind a step are not waited for by a gather": BEHIND["forward"],
    "what is fetched ahead lacks gradients": BEHIND[SUBGROUPS],
    "what is taken back goes before what went up": case_of("speculate", ("nvme", "none", "none", 1)),
    "a gradient is looked at before it has landed": SECTIONS["host memory, bf16, added up"],
    "the norm is taken before gradients have landed": SECTIONS["host memory, bf16, added up"],
    "a gradient is copied before it is computed": SECTIONS["host memory, bf16, added up"],
    "a copy is taken for over": EVERYWHERE,
    "a block is given away without waiting": EVERYWHERE,
    "a copy is marked before it is queued": EVERYWHERE,
    "shards are marked where they are computed with": EVERYWHERE,
    "shards set out where they are computed with": SIZES["host memory"][0],
}


def assert_right(chosen, mutation):
    [(expected, found)] = trained([chosen], mutation)
    assert_same(expected, found)
    assert found["copies_where_it_computes"] == len(found["norms"])


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_ENGINES)
def test_every_mistake_of_an_engine_is_found(mutation):
    with pytest.raises(AssertionError):
        assert_right(FOUND_IN[mutation], mutation)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_UPDATES_BEHIND)
def test_a_mistake_with_updates_behind_is_found(mutation):
    sections = [behind("forward", "nvme", **BF16), behind("backward", "nvme", ahead=True)]
    with pytest.raises(AssertionError):  # other numbers, or an error in the process that trains
        assert_all_same(trained(sections, mutation))

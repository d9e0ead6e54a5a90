"""Stages of `torch.distributed.pipelining` over FSDP2: 2 stages x 2 data-parallel ranks, spawned once."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nvme_offload import OffloadAdamW, initialize, split_parameters
from tests.support import build
from tests.support.layered_model import NUM_BLOCKS, Part, batch, loss_of, named_state, train, weights
from tests.support.precision import PIPELINES_REDUCE_ONCE
from tests.support.ranks import run_ranks
from tests.support.sharded_model import assert_same, full_state

NUM_MICRO_BATCHES, STEPS = 4, 2
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
BF16 = {"bf16": {"enabled": True}}
FP32_REDUCTION = {"communication_data_type": "fp32"}
MODES = {
    "fp32": ({}, 0),
    "bf16, fp32 gradients": ({**BF16, **FP32_REDUCTION, "gradient_accumulation_dtype": "fp32"}, 0),
    "bf16, fp32 reduction": ({**BF16, **FP32_REDUCTION}, 0),
    "bf16, fp32 accumulation": ({**BF16, "gradient_accumulation_dtype": "fp32"}, 0),
    "bf16": (BF16, 0),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 1e-3),  # small gradients are divided later
}
"""Section and relative tolerance; 0 means the same bits."""
if PIPELINES_REDUCE_ONCE:  # and refuse by name what that loses; see test_precision_sums.py
    MODES = {
        name: mode for name, mode in MODES.items() if name not in ("bf16, fp32 reduction", "bf16, fp32 accumulation")
    }
QUICK = ("bf16", "1F1B")  # and test_precision_matrix.py has every mode in every run
OTHERS = [*((mode, "1F1B") for mode in MODES if mode != "bf16"), ("fp32", "GPipe"), ("bf16", "GPipe")]
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


section = partial(build.section, stage=1, accumulation=NUM_MICRO_BATCHES, clip=0.1, adamw=ADAMW)


def stage_module(number):
    half = NUM_BLOCKS // 2
    return Part(range(number * half, (number + 1) * half))


def schedule_of(name, module, mesh, loss_fn):
    stage = PipelineStage(module, mesh.get_local_rank("pp"), 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return SCHEDULES[name](stage, NUM_MICRO_BATCHES, loss_fn=loss_fn)


def run_schedule(schedule, mesh, step):
    tokens, target = batch(step, mesh.get_local_rank("dp_shard"))
    losses = []
    if mesh.get_local_rank("pp") == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=target, losses=losses)
    return [loss.item() for loss in losses]


class Pipeline:
    """An engine for this rank's stage, and its schedule."""

    def __init__(self, mesh, schedule, config):
        self.mesh, self.number = mesh, mesh.get_local_rank("pp")
        module = stage_module(self.number)
        if "tp" in mesh.mesh_dim_names:
            plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
            module = parallelize_module(module, mesh["tp"], plan)
        self.engine = initialize(module, config, mesh=mesh)
        self.schedule = schedule_of(schedule, self.engine.module, mesh, self.engine.pipeline_loss(loss_of))

    def run(self, step):
        """Forward and backward of a step; the losses are known in the last stage only."""
        scale = self.engine.loss_scale
        return [loss / scale for loss in run_schedule(self.schedule, self.mesh, step)]

    def steps(self, numbers):
        """Losses and norms of these steps."""
        losses, norms = [], []
        for step in numbers:
            losses += self.run(step)
            self.engine.step()
            norms.append(self.engine.get_global_grad_norm())
        return losses, norms

    def train(self):
        """Losses, norms, and the whole state of this stage at the end by name of the parameter."""
        with self.engine as engine:
            return *self.steps(range(STEPS)), named_state(engine)


def train_whole(mesh, config):
    with initialize(Part(), config, mesh=mesh["dp_shard"]) as engine:
        return *train(engine, mesh.get_local_rank("dp_shard"), STEPS), named_state(engine)


def train_plainly(mesh):
    """The parts without the engine; then a step in which only the last stage has gradients, and its two norms."""
    module = stage_module(mesh.get_local_rank("pp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in [*module.blocks.values(), module]:
        fully_shard(part, mesh=mesh["dp_shard"], mp_policy=policy, reshard_after_forward=False)
    split_parameters(module)
    schedule = schedule_of("1F1B", module, mesh, loss_of)
    losses, norms = [], []
    with OffloadAdamW(module.parameters(), **ADAMW, offload=section(), norm_group=mesh.get_group("pp")) as optimizer:
        for step in range(STEPS):
            losses += run_schedule(schedule, mesh, step)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.total_norm)
        state = full_state(module, optimizer)
        run_schedule(schedule, mesh, STEPS)
        squares = sum(p.grad.full_tensor().double().square().sum().item() for p in module.parameters())
        if mesh.get_local_rank("pp") == 0:
            optimizer.zero_grad()
        optimizer.step()
        return losses, norms, state, (optimizer.total_norm, math.sqrt(squares))


def overflow(mesh):
    """An infinite gradient on the first rank of the first stage alone."""
    config = section(fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    pipeline, seen = Pipeline(mesh, "1F1B", config), []
    with warnings.catch_warnings(action="error", category=RuntimeWarning), pipeline.engine as engine:
        before = full_state(engine.module, engine.optimizer)
        for step, overflows in enumerate([False, True, False]):
            pipeline.run(step)
            if overflows and mesh.get_local_rank("pp") == mesh.get_local_rank("dp_shard") == 0:
                next(engine.module.parameters()).grad.to_local().view(-1)[0] = math.inf
            engine.step()
            after = full_state(engine.module, engine.optimizer)
            same, before = all(torch.equal(value, before[key]) for key, value in after.items()), after
            seen.append((same, engine.loss_scale, engine.optimizer.stats().skipped_steps))
    return seen


def refused(mesh):
    message = r"dimension 'pp'.*call schedule\.step\(\.\.\.\) and then engine\.step"
    with Pipeline(mesh, "GPipe", section()).engine as engine:
        with pytest.raises(RuntimeError, match=message):
            engine.backward(torch.zeros((), requires_grad=True))
        with pytest.raises(RuntimeError, match=r"accumulate was called in a mesh with a dimension 'pp'"):
            engine.accumulate(torch.sum, [torch.zeros(2)] * engine.gradient_accumulation_steps)


def typed_stages(mesh):
    """What is computed in which dtype where the last stage alone is fp32, and where a name is in one stage alone."""
    number, seen = mesh.get_local_rank("pp"), []
    for typed, more in ((True, {}), (False, {"fp32_modules": ["head"]})):
        module = stage_module(number)
        if typed and number == 0:
            module.bfloat16()
        with initialize(module, section(**BF16, **more), mesh=mesh) as engine:
            seen.append({row["compute"] for row in engine.precision_plan.to_dict()["parameters"]})
    return seen


def checkpoints(mesh, path, drive):
    """Saved after two steps: what a pipeline, with everything on NVMe, and a run without stages make of it."""
    straight = Pipeline(mesh, "1F1B", section(**BF16))
    straight.steps(range(2))
    straight.engine.save_checkpoint(path, client_state={"rank": mesh.get_rank()})
    saved = named_state(straight.engine)
    result = {"straight": straight.steps(range(2, 4)), "state": named_state(straight.engine)}
    with pytest.raises(ValueError, match="one stage of a pipeline; save a checkpoint, load it into the whole model"):
        straight.engine.export_safetensors(path / "weights")
    straight.engine.close()
    there = {"device": "nvme", "nvme_path": str(drive)}
    on_drive = section(drive, **BF16, offload_gradients=there)
    on_drive["zero_optimization"]["offload_param"] = there
    resumed = Pipeline(mesh, "1F1B", on_drive)
    resumed.steps(range(7, 8))
    assert resumed.engine.load_checkpoint(path)[1] == {"rank": 0}
    assert_same(named_state(resumed.engine), saved)
    result["resumed"] = resumed.steps(range(2, 4))
    assert_same(named_state(resumed.engine), result["state"])
    resumed.engine.close()
    with initialize(nn.Linear(8, 8), section(), mesh=mesh) as engine:
        for refused in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(ValueError, match=r"stages 0 and 1 of the pipeline both have 'model\.weight'"):
                refused(path)
    left = {entry.name for entry in path.iterdir()}
    assert left == {"latest", "global_step2"}, left
    with initialize(Part(), section(**BF16)) as engine:
        engine.load_checkpoint(path)
        whole = named_state(engine)
        engine.save_checkpoint(path, tag="whole")
    assert_same({name: whole[name] for name in saved}, saved)
    with Pipeline(mesh, "1F1B", section(**BF16)).engine as engine:
        engine.load_checkpoint(path, tag="whole")
        assert_same(named_state(engine), saved)
    return result


def trained_cases(mesh, cases):
    """Return what a run without stages gives by mode, and a pipeline by mode and schedule."""
    modes = {mode for mode, _ in cases}
    results = {name: train_whole(mesh, section(**mode)) for name, (mode, _) in MODES.items() if name in modes}
    for mode, schedule in cases:
        results[mode, schedule] = Pipeline(mesh, schedule, section(**MODES[mode][0])).train()
    return results


def every_case(rank, world_size, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    results = {"overflow": overflow(mesh)}
    refused(mesh)
    results["typed stages"] = typed_stages(mesh)
    results |= trained_cases(mesh, [QUICK])
    results["stage 3 on nvme"] = Pipeline(mesh, "1F1B", section(path, **BF16, stage=3)).train()
    results["plain"] = train_plainly(mesh)
    return results


def slow_cases(rank, world_size, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    results = trained_cases(mesh, OTHERS)
    results["checkpoints"] = checkpoints(mesh, path.parent / "stages", path)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    results["tp"] = train_whole(mesh, section())
    results["tp", "1F1B"] = Pipeline(mesh, "1F1B", section()).train()
    return {**results, "checkpoints, tp": checkpoints(mesh, path.parent / "stages and tp", path)}


@pytest.fixture(scope="module")
def ranks(once):
    def trained(folder):
        path = folder / "drive"  # checkpoints go beside it
        path.mkdir()
        results = run_ranks(every_case, 4, path)
        assert not list(path.iterdir())
        return results

    return once("pipeline", trained)


def test_a_pipeline_matches_the_unpipelined_run(ranks):
    assert_matches(ranks, *QUICK)


@pytest.mark.slow
def test_the_other_modes_match_and_a_pipeline_resumes_from_one_checkpoint_bit_for_bit(tmp_path):
    path = tmp_path / "drive"
    path.mkdir()
    ranks = run_ranks(slow_cases, 4, path)
    for case in [*OTHERS, ("tp", "1F1B")]:
        assert_matches(ranks, *case)
    for results in ranks:
        for mesh in "checkpoints", "checkpoints, tp":  # and so does the whole model
            assert results[mesh]["resumed"] == results[mesh]["straight"]


def assert_matches(ranks, mode, schedule):
    tolerance = 1e-6 if mode == "tp" else MODES[mode][1]
    for rank, results in enumerate(ranks):
        (losses, norms, whole), (own_losses, own_norms, part) = results[mode], results[mode, schedule]
        assert own_norms == pytest.approx(norms, rel=tolerance or 1e-12)
        assert own_norms == ranks[0][mode, schedule][1], "one number for all stages and ranks"
        assert own_losses == pytest.approx(losses if rank >= 2 else [], rel=tolerance)
        expected = {name: whole[name] for name in part}
        if tolerance:
            assert (weights(part) - weights(expected)).norm() <= tolerance * weights(expected).norm()
        else:
            assert_same(part, expected)
    joined = ranks[0][mode, schedule][2] | ranks[2][mode, schedule][2]
    assert joined.keys() == ranks[0][mode][2].keys()


def test_stage_3_on_nvme_gives_the_bits_of_stage_1_in_memory(ranks):
    """The schedule reduces once per step, whatever the stage."""
    for results in ranks:
        nvme, cpu = results["stage 3 on nvme"], results["bf16", "1F1B"]
        assert nvme[:2] == cpu[:2]
        assert_same(nvme[2], cpu[2])


def test_the_engine_is_a_plain_pipeline_bit_for_bit(ranks):
    for results in ranks:
        (losses, norms, state, _), engine = results["plain"], results["bf16", "1F1B"]
        assert (losses, norms) == engine[:2]
        for ours, theirs in zip(state.values(), engine[2].values(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_stage_without_gradients_takes_part_in_the_norm(ranks):
    norm, _ = ranks[0]["plain"][3]
    _, exact = ranks[2]["plain"][3]
    assert norm == pytest.approx(exact, rel=1e-9)
    assert {results["plain"][3][0] for results in ranks} == {norm}


def test_an_overflow_in_one_stage_skips_on_all(ranks):
    for results in ranks:
        assert results["overflow"] == [(False, 256, 0), (True, 128, 1), (False, 128, 1)]


def test_a_stage_is_computed_in_the_dtypes_of_the_whole_model(ranks):
    for rank, results in enumerate(ranks):
        assert results["typed stages"] == ([{"bf16"}, {"bf16"}] if rank < 2 else [{"fp32"}, {"bf16", "fp32"}])

"""Muon: whole matrices, on one rank the bits of torch.optim.Muon, on several the same within rounding."""

import pytest
import torch
from torch.nn import Parameter

from nvme_offload import ConfigError, OffloadAdamW, OffloadMuon, initialize
from tests.support.interrupts import STRIKES, every, raise_struck, sigint_at_update, strided, struck
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sharded_model import ACCUMULATION, assert_same, full_state, loss_of, sharded_model
from tests.support.sharded_model import section as sharded_section
from tests.support.tiers import goes_on
from tests.support.training import assert_same_bits, assert_same_training, param, params_of, section, set_grads

SHAPES = [(64, 192), (192, 64), (131, 137), (150, 150), (1, 5), (7, 1)]
SETTINGS = {"lr": 2e-2, "weight_decay": 0.1, "momentum": 0.9}
VARIANTS = [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"momentum": 0.0}, {"ns_steps": 3}]


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        pytest.param(dtype, changes, marks=pytest.mark.slow if changes and dtype is not torch.bfloat16 else ())
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for changes in VARIANTS
    ],
    ids=str,
)
def test_one_rank_has_torchs_bits(changes, dtype, drive):
    settings = {**SETTINGS, **changes}
    params = params_of(SHAPES, dtype)
    masters = [Parameter(p.detach().float()) for p in params]
    theirs = torch.optim.Muon(masters, **settings)
    with OffloadMuon(params, **settings, offload=section(drive, buffers=2)) as ours:
        ours.place()
        assert ours.stats().num_subgroups == len(SHAPES), "no matrix is cut, none shares a subgroup"
        for step in range(3):
            set_grads(params, step)
            for p, master in zip(params, masters, strict=True):
                master.grad = p.grad.float()
            ours.step()
            theirs.step()
        state = ours.state_dict()["state"]
        for i, (p, master) in enumerate(zip(params, masters, strict=True)):
            assert_same_bits(state[i].get("master", p.detach()), master.detach())
            assert_same_bits(state[i]["momentum_buffer"], theirs.state[master]["momentum_buffer"])
    assert list(drive.iterdir()) == []


def test_the_unclamped_rate_of_a_matrix_is_the_root_of_its_rows_over_its_columns():
    """torch has this rate since 2.14; a step of it is that of "original" with the rate of each shape."""
    for rows, columns in SHAPES:
        runs = [params_of([(rows, columns)], torch.float32) for _ in range(2)]
        rates = (1e-2, 1e-2 * (rows / columns) ** 0.5 / max(1, rows / columns) ** 0.5)
        for params, lr, kind in zip(runs, rates, ("spectral_unclamped", "original"), strict=True):
            set_grads(params, 0)
            with OffloadMuon(params, lr=lr, weight_decay=0, adjust_lr_fn=kind, offload=section()) as optimizer:
                optimizer.step()
        torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-6, atol=1e-7)


def test_nvme_and_memory_agree_with_clipping_and_changes_behind_our_back(drive):
    runs = [params_of(SHAPES, torch.bfloat16, torch.float16) for _ in range(2)]
    with (
        OffloadMuon(runs[0], **SETTINGS, offload=section(drive, buffers=2, clip=1.0)) as nvme,
        OffloadMuon(runs[1], **SETTINGS, offload=section(None, clip=1.0)) as memory,
    ):
        for step in range(4):
            for params, optimizer in zip(runs, (nvme, memory), strict=True):
                set_grads(params, step)
                if step == 2:
                    params[0].data[0] = 0.5
                    with pytest.warns(RuntimeWarning, match="1 tiles"):
                        optimizer.step()
                else:
                    optimizer.step()
        assert nvme.stats().clip_coef < 1
        assert_same_training(nvme, memory)


def test_other_parameters_have_adamw(drive):
    params = params_of([(64, 192), (64,), (3, 4, 5)], torch.bfloat16)
    same = params_of([(64, 192), (64,), (3, 4, 5)], torch.bfloat16)
    with (
        OffloadMuon(params, lr=1e-2, weight_decay=0.1, offload=section(drive)) as optimizer,
        OffloadAdamW(same[1:], lr=1e-2, weight_decay=0.1, offload=section()) as adamw,
    ):
        assert [group["rule"] for group in optimizer.param_groups] == ["Muon", "AdamW"]
        for step in range(3):
            set_grads(params, step)
            for p, q in zip(params, same, strict=True):
                q.grad = p.grad
            optimizer.step()
            adamw.step()
        assert set(optimizer.state[params[0]]) == {"master", "momentum_buffer"}
        for p, q in zip(params[1:], same[1:], strict=True):
            assert_same_bits(dict(optimizer.state[p]), dict(adamw.state[q]))


def test_what_is_no_matrix_is_refused_by_name():
    with pytest.raises(ValueError, match=r'bias has shape \(8,\): Muon is for matrices; put it into .* rule = "AdamW"'):
        OffloadMuon([{"params": [("bias", param((8,)))]}], offload=section())
    with pytest.raises(ValueError, match="group 0: rule = 'SGD': must be one of Muon, AdamW"):
        OffloadMuon([param((8, 8))], rule="SGD", offload=section())
    with OffloadMuon([param((8, 8))], offload=section()) as optimizer:
        set_grads(optimizer.param_groups[0]["params"], 0)
        optimizer.param_groups[0]["rule"] = "AdamW"
        with pytest.raises(ValueError, match="group 0: rule = 'AdamW': its state is then exp_avg"):
            optimizer.step()


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1), ("momentum", -1), ("weight_decay", -1), ("eps", -1), ("ns_steps", 100), ("ns_coefficients", (1, 2)),
     ("adjust_lr_fn", "mine")],
)  # fmt: skip
def test_hyperparameters_that_cannot_be_are_named(name, value):
    with pytest.raises(ValueError, match=f"parameter group 0: {name} = "):
        OffloadMuon([param((8, 8))], **{name: value}, offload=section())


def test_a_matrix_larger_than_a_staging_buffer_is_named(drive):
    small = section(drive, buffers=2)
    small["zero_optimization"]["offload_optimizer"]["staging_budget"] = "4MiB"
    with pytest.raises(ConfigError, match=r"state of parameter 1 of group 0 .* larger than a staging buffer"):
        OffloadMuon([param((8, 8)), param((1000, 1000))], offload=small)
    assert list(drive.iterdir()) == []


def test_six_bytes_each_way(drive):
    with OffloadMuon([param((800, 250)), param((250, 800), seed=1)], offload=section(drive, buffers=2)) as optimizer:
        set_grads(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
        optimizer.synchronize()
        assert optimizer.stats().bytes_written == pytest.approx(6 * 400_000, rel=0.01)


def train_beside_torch(rank, world_size, path):
    """Ours on shards, on both tiers; and torch's Muon and AdamW on whole fp32 weights, fed the same gradients."""
    models = [sharded_model(torch.bfloat16) for _ in range(2)]
    optimizers = [
        OffloadMuon(model.parameters(), **SETTINGS, offload=sharded_section(device, path, clip=0))
        for model, device in zip(models, ("nvme", "cpu"), strict=True)
    ]
    whole = [Parameter(p.detach().full_tensor().clone()) for p in models[0].parameters()]
    stocks = [
        torch.optim.Muon([p for p in whole if p.ndim == 2], **SETTINGS),
        torch.optim.AdamW([p for p in whole if p.ndim != 2], lr=SETTINGS["lr"], weight_decay=0.1),
    ]
    for step in range(2):
        for model in models:
            for micro in range(ACCUMULATION):
                (loss_of(model, rank, step, micro) / ACCUMULATION).backward()
        for p, master in zip(models[0].parameters(), whole, strict=True):
            master.grad = p.grad.full_tensor().float()
        for optimizer in (*optimizers, *stocks):
            optimizer.step()
            optimizer.zero_grad()
    states = [full_state(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    assert_same(*states)
    ours = [p.detach().full_tensor().clone() for p in models[0].parameters()]
    for optimizer in optimizers:
        optimizer.close()
    matrices = [(p, q.detach()) for p, q in zip(ours, whole, strict=True) if p.ndim == 2]
    same_bits = all(torch.equal(p, q) for p, q in matrices)
    ours, theirs = (torch.cat([p.detach().double().flatten() for p in params]) for params in (ours, whole))
    return float((ours - theirs).norm() / theirs.norm()), same_bits, states[0]


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_it_stays_with_torch_on_any_number_of_ranks(world_size, tmp_path):
    """In sizes that no number of ranks divides; on 4 ranks, one has nothing of some matrices."""
    results = run_ranks(train_beside_torch, world_size, tmp_path)
    for difference, same_bits, state in results:
        assert difference <= 1e-6
        assert same_bits or world_size > 1
        assert_same(state, results[0][2])
    assert not list(tmp_path.iterdir())


@STRIKES
@strided(131)
def test_a_step_that_was_cut_off_is_finished_repeated_or_refused(drive, strike, stride):
    runs = [params_of(SHAPES[:2], torch.bfloat16, torch.float32) for _ in range(2)]
    with (
        OffloadMuon(runs[0], **SETTINGS, ns_steps=1, offload=section(drive, buffers=2)) as nvme,
        OffloadMuon(runs[1], **SETTINGS, ns_steps=1, offload=section()) as memory,
    ):
        for step, interrupt in enumerate(every(stride, strike)):
            for params in runs:
                set_grads(params, step % 4)
            memory.step()
            before = nvme.stats().steps
            struck(interrupt, nvme.step)
            if not goes_on(nvme, before):
                assert strike is raise_struck, interrupt.place
                for p, q in zip(*runs, strict=True):
                    p.data.copy_(q.data)
                nvme.load_state_dict(memory.state_dict())
            assert_same_training(nvme, memory)
    assert list(drive.iterdir()) == []


@on_ranks(2)
def test_ctrl_c_on_one_rank_of_two_and_then_its_step_is_finished(rank, world_size, tmp_path):
    """Ctrl-C there, in the middle of a step: the others wait in the gather of a matrix until it goes on."""
    config = sharded_section("nvme", tmp_path)
    config["zero_optimization"]["stage"] = 3
    config["optimizer"] = {"type": "Muon", "params": {"lr": 2e-2, "adjust_lr_fn": "match_rms_adamw"}}
    ends = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Linear(20, 33), torch.nn.Linear(33, 7))
        with initialize(model, config) as engine:
            for step in range(3):
                torch.manual_seed(step)
                engine.backward(engine(torch.randn(4, 9)).square().mean())
                if disturbed and step == 1 and rank == 0:
                    with sigint_at_update(1), pytest.raises(KeyboardInterrupt) as caught:
                        engine.step()
                    assert "step 2 stopped after 1 of" in caught.value.__notes__[0]
                engine.step()
            ends.append(full_state(engine.module, engine.optimizer))
    assert_same(*ends)


def test_the_widest_group_decides_the_smallest_buffer():
    assert [state.name for state in OffloadMuon.rule.widest_states] == ["exp_avg", "exp_avg_sq"]

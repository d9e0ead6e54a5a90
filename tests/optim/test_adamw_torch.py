"""Beside torch: its AdamW as a reference by tolerance, its schedulers, clipping, GradScaler and hooks in use."""

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.support.training import (
    SETTINGS,
    Twin,
    assert_same_bits,
    assert_same_training,
    param,
    params_of,
    set_grads,
    snapshot,
    take_steps,
)

SHAPES = [(50_021,), (33, 65), (1,)]
MIXED = (torch.bfloat16, torch.float32, torch.float16)


def master_of(optimizer, p):
    state = optimizer.state[p]
    return state["master"] if "master" in state else p.detach()


def test_a_learning_rate_may_be_a_tensor(make_adamw):
    p = param((500,))
    twin, optimizer = Twin([p], {**SETTINGS, "lr": 0.5}), make_adamw([p], lr=torch.tensor(0.5))
    take_steps(optimizer, [p], 0, twin=twin)
    twin.assert_equals(optimizer)


def test_clip_grad_norm_from_outside_and_clipping_inside_agree(make_adamw):
    inside, outside = params_of(SHAPES, torch.float32), params_of(SHAPES, torch.float32)
    clipping, plain = make_adamw(inside, clip=1.0), make_adamw(outside)
    for step in range(10):
        set_grads(inside, step)
        set_grads(outside, step)
        norm = clip_grad_norm_(outside, 1.0)
        clipping.step()
        plain.step()
        assert float(norm) > 1
        assert clipping.stats().total_norm == pytest.approx(float(norm), rel=1e-5)
        assert plain.stats().total_norm == pytest.approx(1.0, rel=1e-5)
        assert clipping.stats().clip_coef == pytest.approx(1 / float(norm), rel=1e-5)
    for one, other in zip(inside, outside, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3 * SETTINGS["lr"])


def test_clipping_outlives_a_step_that_is_refused(make_adamw):
    """A hyperparameter is found wrong and put right: the step that follows clips as the refused one would have."""
    ends = []
    for disturbed in (False, True):
        params = params_of([(300,), (5,)], torch.bfloat16)
        optimizer = make_adamw(params, eps=1.0)
        set_grads(params, 0, scale=10.0)
        assert optimizer.clip_grad_norm_(1.0) > 1
        if disturbed:
            optimizer.param_groups[0]["lr"] = math.nan
            with pytest.raises(ValueError, match="lr = nan"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = SETTINGS["lr"]
        optimizer.step()
        assert optimizer.total_norm == pytest.approx(1.0)
        optimizer.step()
        assert optimizer.total_norm > 1, "the factor is for one step"
        ends.append(snapshot(optimizer))
        optimizer.close()
    assert_same_bits(*ends)


def test_closure_step_hooks_and_profiling_work_as_in_torch(make_adamw):
    p = param((500,), torch.float32)
    optimizer = make_adamw([p])
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        called.append("closure")
        return loss

    before = p.detach().clone()
    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert called == ["before", "closure", "after"]
    assert (p.detach() != before).all()


class TestGradScaler:
    """torch.amp.GradScaler leaves unscaling to us, unless the user asks for it."""

    SCALE = 2.0**10

    def scaled(self, params, step):
        set_grads(params, step, scale=0.01)
        for p in params:
            p.grad.mul_(self.SCALE)

    def scaler(self, **options):
        scaler = torch.amp.GradScaler("cpu", init_scale=self.SCALE, growth_interval=1000, **options)
        scaler.scale(torch.ones(()))  # the scale comes to life
        return scaler

    @pytest.mark.parametrize("dtype", MIXED, ids=str)
    @pytest.mark.parametrize("clip", [0.0, 0.1])
    def test_equals_unscaled_training(self, make_adamw, dtype, clip):
        scaled, unscaled = params_of(SHAPES, dtype), params_of(SHAPES, dtype)
        optimizer, plain = make_adamw(scaled, clip=clip), make_adamw(unscaled, clip=clip)
        scaler = self.scaler()
        for step in range(10):
            self.scaled(scaled, step)
            set_grads(unscaled, step, scale=0.01)
            scaler.step(optimizer)
            scaler.update()
            plain.step()
        assert optimizer.stats().steps == 10
        assert optimizer.stats().total_norm == pytest.approx(plain.stats().total_norm, rel=1e-6)
        assert not hasattr(optimizer, "grad_scale")
        for one, other in zip(scaled, unscaled, strict=True):
            torch.testing.assert_close(
                master_of(optimizer, one), master_of(plain, other), rtol=1e-4, atol=1e-3 * SETTINGS["lr"]
            )
        if dtype is not torch.float16:  # the scale is a power of two: fp16 alone loses bits of small gradients
            assert_same_training(optimizer, plain)

    def test_an_overflow_skips_the_step_and_halves_the_scale(self, make_adamw, recwarn):
        params = params_of(SHAPES, torch.float16)
        optimizer, scaler = make_adamw(params), self.scaler()
        self.scaled(params, 0)
        scaler.step(optimizer)
        scaler.update()
        before = snapshot(optimizer)
        self.scaled(params, 1)
        params[1].grad[3, 3] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == self.SCALE / 2
        assert_same_bits(snapshot(optimizer), before)
        assert optimizer.stats().skipped_steps == 1
        assert not [warning for warning in recwarn if "skipped" in str(warning.message)]  # the scaler's business
        self.scaled(params, 2)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.stats().steps == 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_unscale_then_clip_then_step(self, make_adamw, dtype):
        scaled, unscaled = params_of(SHAPES, dtype), params_of(SHAPES, dtype)
        optimizer, plain, scaler = make_adamw(scaled), make_adamw(unscaled), self.scaler()
        for step in range(5):
            self.scaled(scaled, step)
            set_grads(unscaled, step, scale=0.01)
            scaler.unscale_(optimizer)
            assert_same_bits([p.grad for p in scaled], [p.grad for p in unscaled])
            clip_grad_norm_(scaled, 0.5)
            clip_grad_norm_(unscaled, 0.5)
            scaler.step(optimizer)
            scaler.update()
            plain.step()
        assert_same_training(optimizer, plain)

    def test_a_step_that_raised_leaves_no_scale_behind(self, make_adamw, monkeypatch):
        p = param((500,), torch.float32)
        optimizer, scaler, twin = make_adamw([p]), self.scaler(), Twin([p])
        self.scaled([p], 0)
        with monkeypatch.context() as patch:
            patch.setattr("nvme_offload.optim.step.stepper.flat_grad", lambda *arguments: [][0])
            with pytest.raises(IndexError):
                scaler.step(optimizer)
        scaler.update()
        set_grads([p], 1, scale=0.01)
        twin.step([p.grad])
        for q in [p]:
            q.grad.mul_(self.SCALE)
        scaler.step(optimizer)
        twin.assert_equals(optimizer)


def test_adams_state_dict_is_taken_where_it_means_the_same(make_adamw):
    """torch.optim.Adam adds weight decay to the gradient; without decay it is AdamW."""
    for decay in (0.0, 0.1):
        params = params_of(SHAPES, torch.float32)
        adam = torch.optim.Adam(params, lr=1e-3, weight_decay=decay)
        set_grads(params, 0)
        adam.step()
        optimizer = make_adamw(params)
        if decay:
            with pytest.raises(ValueError, match=r"group 0: weight_decay = 0\.1 .* L2 penalty of torch\.optim\.Adam"):
                optimizer.load_state_dict(adam.state_dict())
        else:
            optimizer.load_state_dict(adam.state_dict())
            assert_same_bits(optimizer.state_dict()["state"][0]["exp_avg"], adam.state[params[0]]["exp_avg"])

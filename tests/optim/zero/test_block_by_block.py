"""Micro-batches that go block by block: the bits of the plain loop, half the gathers, and words for what cannot be.

In any precision, stage and tier, by any rule, on one rank and on two: durable/test_drawn_runs.py.
"""

import contextlib
import itertools
import threading
import warnings
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

from nvme_offload import BlockOrderError, ConfigError, StateError, SwapIOError, get_full_grad, initialize
from tests.support import small_llama
from tests.support.block_mistakes import MISTAKES, take_in_place_of_reductions
from tests.support.failing_drive import Failing, Op
from tests.support.interrupts import EACH, SLOW, STRIKES, every, raise_struck
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sharded_model import GOES_ON, assert_same, full_state
from tests.support.tiers import EVERYTHING, PRECISIONS, VOCABULARY, Layer, Model, be_eager, make, section, strike_each


def config_of(path, order, count=2, precision="bf16", **more):
    keys = {key: more.pop(key) for key in ("gradient_clipping", "overlap_step", "skip_non_finite") if key in more}
    return section(path, accumulation=count, **more) | keys | {"micro_batch_order": order} | PRECISIONS[precision]


def micro_batches(step, count, rank=0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(0, VOCABULARY, (3, 7), generator=generator) for _ in range(count)]


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), (tokens * 7 + 3).flatten() % VOCABULARY)


def step_of(engine, number, rank=0, loss_of=loss_of):
    """One step in the order of the section; `horizontal` is the plain loop. Returns losses and norm."""
    batches = micro_batches(number, engine.gradient_accumulation_steps, rank)
    if engine.config.micro_batch_order != "horizontal":
        losses = engine.accumulate(partial(loss_of, engine), batches)
        assert not any(loss.requires_grad for loss in losses)
        engine.step()
    else:
        losses = []
        for tokens in batches:
            losses.append(loss_of(engine, tokens))
            engine.backward(losses[-1])
            engine.step()
    return [*(loss.item() for loss in losses), engine.get_global_grad_norm()]


def train(config, steps=3, rank=0, model=None, loss_of=loss_of, **shape):
    with initialize(model(), config) if model else make(config, **{"num_layers": 3, **shape}) as engine:
        seen = [step_of(engine, number, rank, loss_of) for number in range(steps)]
        return full_state(engine.module, engine.optimizer), seen


@cache
def of_the_loop(count, steps, num_layers=3, **more):
    """Train in the plain loop with nothing on NVMe; return what came of it."""
    return train(config_of(None, "horizontal", count, **more), steps, num_layers=num_layers)


def compare(first, second):
    assert_same(second[0], first[0])
    assert second[1] == first[1]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "nvme_offload: micro-batch"]


BACKWARD = {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False}
PLAIN = {key: BACKWARD[key] for key in ("gradient_clipping", "skip_non_finite")}


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_steps_are_hidden_as_ever(alone, tmp_path, overlap):
    """In the first step, in which the model is looked at, no update begins in backward; then all of them may."""
    more = PLAIN if overlap == "backward" else {}
    config = config_of(tmp_path, "vertical", 3, state="nvme", overlap_step=overlap, **more)
    with make(config, num_layers=3) as engine:
        step, optimizer = engine.step, engine.optimizer
        if overlap == "backward":  # from the second step on; a busy machine comes to `step()` before the first update
            hidden = lambda: not engine.global_steps or optimizer.stats().updates_in_backward  # noqa: E731
            engine.step = lambda: (optimizer.store.worker.wait_until(hidden), step())
        seen = [step_of(engine, number) for number in range(3)]
        compare(of_the_loop(3, 3, **more), (full_state(engine.module, engine.optimizer), seen))
        stats = engine.optimizer.stats()
    assert stats.updates_behind > 0
    assert (stats.updates_in_backward > 0) == (overlap == "backward")


@pytest.mark.parametrize("orders", [("horizontal", "vertical"), ("vertical", "horizontal")], ids="-".join)
@pytest.mark.parametrize("half", [1, pytest.param(5, marks=SLOW)])
def test_a_run_goes_on_in_the_other_order(alone, tmp_path, orders, half):
    wanted = of_the_loop(3, 2 * half)
    seen = []
    (tmp_path / "drive").mkdir()
    for part, order in enumerate(orders):
        tiers = EVERYTHING if order == "vertical" else {}
        with make(config_of(tmp_path / "drive", order, 3, **tiers), num_layers=3) as engine:
            if part:
                engine.load_checkpoint(tmp_path / "saved")
            seen += [step_of(engine, number) for number in range(half * part, half * (part + 1))]
            engine.save_checkpoint(tmp_path / "saved")
            state = full_state(engine.module, engine.optimizer)
    compare(wanted, (state, seen))


IN_BACKWARD = {
    1: [("bf16", 3, True, EVERYTHING), ("fp32", 3, False, EVERYTHING), ("bf16", 2, False, {"param": "nvme"})],
    2: [("bf16", 3, False, EVERYTHING), ("fp32", 1, True, EVERYTHING)],
}
"""By the number of ranks: precision, stage, whether ends are tied, tiers."""


@pytest.mark.parametrize("ranks", IN_BACKWARD)
@on_ranks("ranks")
def test_blocks_are_updated_in_backward_where_they_were_gathered(rank, world_size, tmp_path):
    """No gradient is written or read then."""
    for precision, stage, tied, tiers in IN_BACKWARD[world_size]:
        wanted = train(config_of(None, "horizontal", 3, precision, stage=stage, **PLAIN), 3, rank, tied=tied)
        config = config_of(tmp_path, "vertical", 3, precision, stage=stage, **BACKWARD, **tiers)
        with make(config, num_layers=3, tied=tied) as engine:
            seen, moved = [], []
            for number in range(3):
                seen.append(step_of(engine, number, rank))
                engine.optimizer.synchronize()
                stats = engine.optimizer.stats()
                moved.append(stats.grad_bytes_written + stats.grad_bytes_read)
            compare(wanted, (full_state(engine.module, engine.optimizer), seen))
            assert stats.updates_in_backward > 0
            assert moved[0] == moved[-1], "only the first step, in which the model is looked at, moved gradients"
            check_buffers(engine)


class Spare(Model):
    """Every layer has a parameter that nobody uses, beside one that is used in the same subgroup."""

    def __init__(self):
        super().__init__(num_layers=3, width=129)
        for layer in self.layers:
            layer.spare = nn.Parameter(torch.zeros(7))


@pytest.mark.parametrize("rule", ["AdamW", "Muon"])
def test_gradients_wait_for_the_step_that_needs_them(alone, tmp_path, rule):
    """With a parameter that got none, in the same subgroup; of a matrix, which is updated whole."""

    def model():
        torch.manual_seed(0)
        return Spare() if rule == "AdamW" else Model(num_layers=3)

    more = {"optimizer": {"type": rule, "params": {"lr": 1e-2}}}
    wanted = train(config_of(None, "horizontal", 2, **PLAIN) | more, model=model)
    compare(wanted, train(config_of(tmp_path, "vertical", 2, **BACKWARD, **EVERYTHING) | more, model=model))


def test_a_guess_in_backward_is_taken_back_where_the_step_clips(alone, tmp_path, monkeypatch):
    """Parameters come back from the commit; gradients are still on the drive."""
    be_eager(monkeypatch)
    for clip in (1e9, 0.5):
        wanted = of_the_loop(2, 4, gradient_clipping=clip)
        config = config_of(tmp_path, "vertical", 2, overlap_step="speculate", gradient_clipping=clip, **EVERYTHING)
        config["zero_optimization"]["offload_optimizer"] |= {"durable": f"run-{clip}", "staging_budget": "4MiB"}
        with make(config, num_layers=3) as engine:
            seen = [step_of(engine, number) for number in range(4)]
            compare(wanted, (full_state(engine.module, engine.optimizer), seen))
            stats = engine.optimizer.stats()
        assert stats.updates_in_backward > 0
        assert stats.updates_behind > 0
        assert (stats.updates_taken_back > 0) == (clip == 0.5)


def test_gradients_of_updated_blocks_are_gone(alone, tmp_path):
    with make(config_of(tmp_path, "vertical", 2, **BACKWARD, **EVERYTHING), num_layers=3) as engine:
        step_of(engine, 0)
        engine.accumulate(partial(loss_of, engine), micro_batches(1, 2))
        with pytest.raises(StateError, match="call step"):
            full_state(engine.module, engine.optimizer)
        with pytest.raises(StateError, match="the present gradient"):
            get_full_grad(engine.module.layers[1].up.weight)
        engine.step()
        step_of(engine, 2)


@GOES_ON
def test_an_io_error_after_an_update_in_backward_says_that_a_checkpoint_leads_on(alone, tmp_path, monkeypatch):
    with make(config_of(tmp_path, "vertical", 2, **BACKWARD, **EVERYTHING), num_layers=4) as engine:
        step_of(engine, 0)
        engine.save_checkpoint(tmp_path / "saved")
        saved = full_state(engine.module, engine.optimizer)
        layer = engine.module.layers[0]
        calls = Trouble(4, SwapIOError(5, path="here", offset=0, size_bytes=1, direction="read"))  # layer 3 is updated
        hook = layer.register_forward_pre_hook(calls)
        with pytest.raises(SwapIOError) as raised:
            step_of(engine, 1)
        hook.remove()
        assert "checkpoint" in "".join(raised.value.__notes__)
        with pytest.raises(StateError, match="checkpoint"):
            step_of(engine, 1)
        engine.load_checkpoint(tmp_path / "saved")
        assert_same(full_state(engine.module, engine.optimizer), saved)
        step_of(engine, 1)
        check_buffers(engine)


def llama(tied, **more):
    sizes = {"num_hidden_layers": 3, "vocab_size": VOCABULARY, "max_position_embeddings": 2048}
    return small_llama.llama(tie_word_embeddings=tied, **sizes, **more)


def qwen(tied):
    return llama(tied, kinds=(Qwen2ForCausalLM, Qwen2Config), num_key_value_heads=2)


def t5(tied):
    return small_llama.t5(vocab_size=VOCABULARY, tie_word_embeddings=tied, dropout_rate=0.0)


@pytest.mark.parametrize(
    ("model", "tied", "steps"),
    [
        (llama, False, 2),
        (t5, True, 2),
        *(pytest.param(*case, 10, marks=SLOW) for case in itertools.product((llama, qwen, t5), (True, False))),
    ],
)
def test_models_of_hugging_face(alone, tmp_path, model, tied, steps):
    """A T5 has two stacks of blocks, the first one's output goes to every block of the second, and ends are shared."""
    ends = [
        train(
            config_of(tmp_path, order, 2, **tiers),
            steps,
            model=partial(model, tied),
            loss_of=lambda model, tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss,
        )
        for order, tiers in (("horizontal", {}), ("vertical", EVERYTHING))
    ]
    compare(*ends)


def test_a_block_is_gathered_twice_however_many_micro_batches_there_are(alone, tmp_path):
    uses = {}
    for count in (1, 2, 5):
        with make(config_of(tmp_path, "vertical", count, **EVERYTHING), num_layers=3, tied=False) as engine:
            for number in range(2):
                step_of(engine, number)
                engine.optimizer.synchronize()
                if number == 0:
                    before = engine.optimizer.stats()
            after = engine.optimizer.stats()
            uses[count] = (after.param_uses - before.param_uses, after.grad_bytes_written - before.grad_bytes_written)
    assert uses[1] == uses[2] == uses[5]


class Dropping(Model):
    """Dropout within blocks and between them."""

    def __init__(self):
        super().__init__(num_layers=3)
        for layer in self.layers:
            layer.down = nn.Sequential(layer.down, nn.Dropout(0.2))


def test_dropout_is_the_same_in_every_run_and_when_a_block_is_computed_again(alone, tmp_path):
    """With one micro-batch the masks are drawn in the order of the plain loop."""
    runs = []
    for order, count in ("vertical", 3), ("vertical", 3), ("horizontal", 1), ("vertical", 1):
        torch.manual_seed(5)
        runs.append(train(config_of(tmp_path, order, count), 2, model=Dropping))
    compare(*runs[:2])
    compare(*runs[2:])


def test_frozen_parts_and_evaluations_between_and_inside_losses(alone, tmp_path):
    def frozen():
        torch.manual_seed(0)
        model = Model(num_layers=4, tied=False)
        for part in (model.embedding, model.layers[0], model.layers[2].up):
            part.requires_grad_(False)
        return model

    def with_evaluation(model, tokens):
        root = getattr(model, "module", model)
        with torch.no_grad():
            weight = 1 + loss_of(model, tokens + 0)
            root.handles = [root.register_forward_hook(lambda *_: None)]  # anew, as TRL does in its reference's forward
        return loss_of(model, tokens) * weight

    ends = [
        train(config_of(tmp_path, order, 2, **tiers), 2, model=frozen, loss_of=with_evaluation)
        for order, tiers in (("horizontal", {}), ("vertical", EVERYTHING))
    ]
    compare(*ends)


@pytest.mark.parametrize(
    ("steps", "backend"),
    [(2, "eager"), *(pytest.param(10, backend, marks=SLOW) for backend in ("aot_eager", "inductor"))],
)
def test_compiled_blocks(alone, tmp_path, steps, backend):
    ends = []
    for order in ("horizontal", "vertical"):
        with make(config_of(tmp_path, order, 2, **EVERYTHING), num_layers=2) as engine:
            for layer in engine.module.layers:
                layer.compile(backend=backend)
            seen = [step_of(engine, number) for number in range(steps)]
            ends.append((full_state(engine.module, engine.optimizer), seen))
    compare(*ends)


class CheckpointedInside(Layer):
    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=False)


def test_checkpointing_around_a_block_is_no_cost_and_inside_it_is_said_once(alone, tmp_path):
    wanted = of_the_loop(2, 2)
    with warnings.catch_warnings(action="error"):
        compare(wanted, train(config_of(tmp_path, "vertical", 2), 2, checkpointing=True))
    torch.manual_seed(0)
    model = Model(num_layers=3)
    for layer in model.layers:
        layer.__class__ = CheckpointedInside
    with pytest.warns(RuntimeWarning, match=r"block layers\.2 has activation checkpointing inside") as said:
        compare(wanted, train(config_of(tmp_path, "vertical", 2), 2, model=lambda: model))
    assert sum("checkpointing inside" in str(each.message) for each in said) == 1


class SkippingLayer(Layer):
    def forward(self, hidden, odd=None):
        self.left = super().forward(hidden + odd[0].add_(1).to(hidden) if isinstance(odd, list) else hidden)
        return self.left


class Stateful(Layer):
    calls = 0

    def forward(self, hidden):
        Stateful.calls += 1
        return super().forward(hidden) * Stateful.calls


class Counting(Layer):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, hidden):
        if self.training:
            self.count += 1
        return super().forward(hidden)


class Replacing(Counting):
    def forward(self, hidden):
        self.count = self.count + 1
        return Layer.forward(self, hidden)


class Cache:
    """As a key-value cache, it is filled by whoever gets it."""


class Odd(Model):
    def __init__(self, kind):
        super().__init__(num_layers=3, tied=False)
        kinds = {"state": Stateful, "buffer": Counting, "later buffer": Counting, "other buffer": Replacing}
        self.layers = nn.ModuleList(kinds.get(kind, SkippingLayer)(33) for _ in range(3))
        self.kind, self.calls = kind, 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens):
        hidden = self.embedding(tokens) * 1.0
        self.calls += 1
        if self.kind in ("buffer", "other buffer", "cache", "shared", "given"):
            self.count += tokens[0, 0]
        uses = {"twice": (0, 1, 2, 0), "no block": (), "layer drop": (0, 1, 2)[self.calls % 2 == 0 :]}
        for use in uses.get(self.kind, (0, 1, 2)):
            odd = {"cache": [Cache()], "set": [{"in": ({3},)}], "given": [self.count], "changed": [[self.count.int()]]}
            before, hidden = hidden, self.layers[use](hidden, *odd.get(self.kind, ()))
            if self.kind == "past":
                hidden = hidden + before
            if self.kind == "shared":
                hidden = hidden + self.count.to(hidden)
            if self.kind == "behind":
                hidden += 1
        if self.kind == "left":
            hidden = hidden + self.layers[0].left
        if self.kind == "penalty":
            hidden = hidden + self.layers[0].up.bias.to_local().square().sum().to(hidden)
        return hidden if self.kind == "rounded" else self.head(hidden) * 1.0


ODD = {
    "cache": r"block layers\.0 is given a Cache, .*use_cache=False",
    "set": r"block layers\.0 is given a set, ",
    "layer drop": r"micro-batch 0 came to block layers\.0 where micro-batch 1 came to block layers\.1",
    "twice": r"block layers\.0 is called twice in one micro-batch",
    "no block": "no block was called",
    "rounded": "the model returns what an fp32 block gives",
    "past": r"what block layers\.\d is given, or goes into that, is used past the block, too",
    "state": r"block layers\.2 gives something else when it is computed again",
    "buffer": r"block layers\.0 changes its buffer count",
    "other buffer": r"block layers\.0 changes its buffer count",
    "given": r"block layers\.0 is given a tensor that was changed in place since",
    "changed": r"block layers\.0 changes an argument, and would do so twice",
    "shared": "forwards change count of the model, and all would find what the latest left there",
    "behind": "code behind a block changes what it gave: write h = h",
    "left": "the loss depends on what a block keeps beside its result",
    "penalty": "the loss depends on .* parameters themselves",
}


@GOES_ON
@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_is_an_error_where_it_is_asked_for(alone, tmp_path, kind):
    torch.manual_seed(0)
    config = config_of(tmp_path, "vertical", 2, **EVERYTHING)
    config["fp32_modules"] = ["layers.2"] if kind == "rounded" else []
    with initialize(Odd(kind), config) as engine:
        with pytest.raises(BlockOrderError, match=ODD[kind]) as raised:
            step_of(engine, 0)
        assert 'micro_batch_order = "horizontal"' in "".join(raised.value.__notes__)
        assert not threads()
        assert engine.micro_steps == 0
        assert all(param.grad is None for param in engine.parameters())
        engine.module.kind = "plain"
        if kind not in ("state", "buffer", "other buffer"):
            step_of(engine, 0)


@GOES_ON
@pytest.mark.parametrize(
    "kind",
    ["cache", "past", "later buffer", *(pytest.param(k, marks=pytest.mark.slow) for k in ("twice", *list(ODD)[8:]))],
)
def test_what_cannot_be_is_said_once_where_it_is_not_asked_for(alone, tmp_path, kind):
    ends = []
    for order in ("horizontal", "auto"):
        torch.manual_seed(0)
        with initialize(Odd(kind), config_of(tmp_path, order, 2, **EVERYTHING)) as engine:
            said = pytest.warns(RuntimeWarning, match=f"go one after the other.*{ODD[kind.removeprefix('later ')]}")
            seen = [step_of(engine.eval(), 0)] if kind == "later buffer" else []
            with said if order == "auto" else contextlib.nullcontext():
                seen.append(step_of(engine.train(), 1))
            seen.append(step_of(engine, 2))
            ends.append((full_state(engine.module, engine.optimizer) | dict(engine.module.named_buffers()), seen))
    compare(*ends)


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_losses_may_be_shares_of_the_step_already_and_any_number(alone, tmp_path, order):
    ends = []
    for divides in (True, False):
        count = 4 if divides else 2
        with make(config_of(tmp_path, order, count), num_layers=2) as engine:
            for number in range(2):
                batches = micro_batches(number, 4)
                share = partial(loss_of, engine) if divides else lambda tokens: loss_of(engine, tokens) / 4
                assert len(engine.accumulate(share, batches, scale_wrt_gas=divides)) == 4
                engine.step()
            assert engine.global_steps == 2
            ends.append(full_state(engine.module, engine.optimizer))
            engine.backward(loss_of(engine, batches[0]))
            engine.step()
            assert engine.micro_steps == (1 if count > 1 else 0), "a step of the loop is as it was"
    assert_same(*ends)


def have_other_numbers(rank, world_size, path):
    with make(config_of(path, "vertical", 2, **EVERYTHING), num_layers=2) as engine:
        batches = micro_batches(0, 2 + rank)
        with pytest.raises(ValueError, match=r"different numbers of micro-batches in a step, by rank: {0: 2, 1: 3}"):
            engine.accumulate(partial(loss_of, engine), batches, scale_wrt_gas=False)
        step_of(engine, 0, rank)
        if rank:
            with pytest.raises(ValueError, match="given 3 micro-batches, and gradient_accumulation_steps = 2"):
                engine.accumulate(partial(loss_of, engine), batches)
        step_of(engine, 1, rank)
        return engine.get_global_grad_norm()


def test_ranks_with_other_numbers_of_micro_batches_get_words(tmp_path):
    first, second = run_ranks(have_other_numbers, 2, tmp_path)
    assert first == second


@GOES_ON
@pytest.mark.parametrize("order", ["auto", "vertical"])
@on_ranks(2)
def test_what_one_rank_cannot_do_is_done_by_none(rank, world_size, tmp_path, order):
    with make(config_of(tmp_path, order, **EVERYTHING), num_layers=3) as engine:
        model, said = engine.module, "forwards change seen of the model"
        model.seen, heard = [], said if rank else f"on rank 1 {said}"
        hook = model.embedding.register_forward_hook(lambda *_: model.seen.append(rank) if rank else None)
        if order == "vertical":
            with pytest.raises(BlockOrderError, match=f"^{heard}"):
                step_of(engine, 0, rank)
            hook.remove()
        with pytest.warns(match=heard) if order == "auto" and rank == 0 else contextlib.nullcontext():
            seen = [step_of(engine, 0, rank)]
        seen.append(step_of(engine, 1, rank))
        compare(train(config_of(None, "horizontal"), 2, rank), (full_state(model, engine.optimizer), seen))
        model.uses = [0, 1 + rank]
        with pytest.raises(StateError, match=r"same blocks on all ranks.*'layers.1' on one, of 'layers.2' on another"):
            step_of(engine, 2, rank)


@GOES_ON
def test_wrong_use_gets_words(alone, tmp_path):
    with make(config_of(tmp_path, "auto", 2), num_layers=2) as engine:
        batches, loss = micro_batches(0, 2), partial(loss_of, engine)
        with pytest.raises(ValueError, match="given 3 micro-batches, and gradient_accumulation_steps = 2"):
            engine.accumulate(loss, [*batches, batches[0]])
        with pytest.raises(ValueError, match="a micro-batch was filled again for the next one"):
            engine.accumulate(loss, (batches[0].add_(0) for _ in range(2)))
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"without gradients: call it outside of torch\.no_"):
            engine.accumulate(loss, batches)
        engine.backward(loss(batches[0]))
        with pytest.raises(RuntimeError, match="with 1 of 2 micro-batches done: it goes through all of a step"):
            engine.accumulate(loss, batches)
        engine.zero_grad()
        assert len(engine.accumulate(loss, iter(batches))) == 2
        for call in (engine.backward, engine.scale):
            with pytest.raises(RuntimeError, match=r"in a step of engine\.accumulate.*call engine\.step\(\) first"):
                call(loss(batches[0]))
        with pytest.raises(RuntimeError, match="with 2 of 2 micro-batches done"):
            engine.accumulate(loss, batches)
        engine.step()
        assert engine.global_steps == 1
        engine.set_gradient_accumulation_boundary(False)
        with pytest.raises(RuntimeError, match=r"after engine\.set_gradient_accumulation_boundary"):
            engine.accumulate(loss, batches)
        engine.set_gradient_accumulation_boundary(None)
        with pytest.raises(TypeError, match=r"outputs\.loss"):
            engine.accumulate(lambda tokens: {"loss": loss(tokens)}, batches)
        step_of(engine, 1)
    with pytest.raises(ConfigError, match="micro_batch_order"):
        make(config_of(tmp_path, "diagonal"))


def check_buffers(engine):
    engine.optimizer.synchronize()
    blocks = engine.optimizer.store.blocks
    for tier in (blocks.params, blocks.grads):
        assert tier is None or not any(block.holds for block in tier.cache.blocks)


class Trouble:
    """A layer's forward, or a loss, that fails once, in one call of many."""

    def __init__(self, at, error):
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, *unused):
        self.calls += 1
        if self.calls == self.at:
            raise self.error


IN_EVERY_RUN = [
    ("horizontal", "error", 4),
    *(("vertical", "error", at) for at in (1, 8, 10)),
    ("vertical", "Ctrl-C", 4),
]
IN_EVERY_RUN += [("vertical", "Ctrl-C", 17)]


@GOES_ON
@pytest.mark.parametrize(
    ("order", "error", "at"),
    [
        pytest.param(
            *(order, error, at),
            marks=() if (order, name, at) in IN_EVERY_RUN else pytest.mark.slow,
            id=f"{order}-{name}-{at}",
        )
        for order, calls in {"horizontal": (1, 4, 8), "vertical": (1, 4, 8, 10, 14, 17)}.items()
        for name, error in {"error": ValueError("trouble"), "Ctrl-C": KeyboardInterrupt()}.items()
        for at in calls
    ],
)
def test_after_an_exception_in_a_block_the_step_is_done_again(alone, tmp_path, order, error, at):
    """In block order calls 1 to 9 of the blocks are those of forward, 10 to 18 those of backward."""
    wanted = of_the_loop(3, 2)
    with make(config_of(tmp_path, order, 3, **EVERYTHING), num_layers=3) as engine:
        seen = [step_of(engine, 0)]
        trouble = Trouble(at, error)
        hooks = [layer.register_forward_pre_hook(trouble) for layer in engine.module.layers]
        if order == "horizontal":
            engine.config = engine.config.model_copy(update={"micro_batch_order": "auto"})
        with pytest.raises(type(error)) as raised:
            step_of(engine, 1)
        assert sum("gradients of this step were dropped" in note for note in raised.value.__notes__) == 1
        assert not threads()
        assert engine.micro_steps == 0
        assert all(param.grad is None for param in engine.parameters())
        check_buffers(engine)
        for hook in hooks:
            hook.remove()
        seen.append(step_of(engine, 1))
        compare(wanted, (full_state(engine.module, engine.optimizer), seen))


def go_on(engine, number):
    """The step, or what is left of it."""
    before, losses = engine.global_steps, []
    while engine.global_steps == before:
        if not engine._accumulation.has_backward:
            losses = engine.accumulate(partial(loss_of, engine), micro_batches(number, 3))
        engine.step()
    return [*(loss.item() for loss in losses), engine.get_global_grad_norm()]


FAILING = [("params", Op.READ), ("grads", Op.WRITE), ("activations", Op.READ), ("activations", Op.WRITE)]


@GOES_ON
@pytest.mark.parametrize(
    ("kind", "op", "first"),
    [
        pytest.param(*failing, first, marks=pytest.mark.slow if (place + turn) % 2 else ())
        for place, failing in enumerate(FAILING)
        for turn, first in enumerate((1, 2, 6))
    ],
)
def test_after_an_io_error_the_step_is_done_again(alone, tmp_path, monkeypatch, kind, op, first):
    """Each time another micro-batch enters a block."""
    wanted = of_the_loop(3, 2, num_layers=5)
    config = config_of(tmp_path, "vertical", 3, **EVERYTHING)
    config["activations"] = {"device": "nvme", "nvme_path": str(tmp_path), "host_budget": "8KiB", "min_bytes": 0}
    with make(config, num_layers=5) as engine:
        seen = [step_of(engine, 0)]
        engine.optimizer.synchronize()
        blocks = getattr(engine.optimizer.store.blocks, kind, None)
        drive = Failing(blocks.cache.tier if blocks else engine.activations.tier, monkeypatch, op, first)
        with contextlib.suppress(SwapIOError):
            step_of(engine, 1)
        assert drive.left <= 0, "it failed"
        drive.healthy = True
        assert not threads()
        if engine.global_steps == 1:
            seen.append(go_on(engine, 1))
            check_buffers(engine)
            compare(wanted, (full_state(engine.module, engine.optimizer), seen))


@GOES_ON
@STRIKES
@pytest.mark.parametrize("stride", [6007, pytest.param(EACH, marks=SLOW)])
def test_a_step_is_done_again_or_refused_wherever_it_is_cut_off(alone, tmp_path, stride, strike):
    config, of_twin = config_of(tmp_path / "drive", "vertical", 3, **EVERYTHING), config_of(None, "horizontal", 3)
    (tmp_path / "drive").mkdir()
    with make(of_twin, num_layers=2) as twin, make(config, num_layers=2) as engine:

        def load(engine):
            twin.save_checkpoint(tmp_path / "checkpoints")
            engine.load_checkpoint(tmp_path / "checkpoints")
            return engine

        strikes, may_refuse = every(stride, strike), strike is raise_struck
        for _, interrupt in strike_each(strikes, engine, twin, step_of, go_on, load, may_refuse=may_refuse):
            assert not threads(), interrupt.place
            interrupt.kept = None


@GOES_ON
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(alone, tmp_path, monkeypatch, name):
    """Steps that hide updates in backward, of a model with tied ends, differ from the loop's, or are refused."""
    wanted = of_the_loop(2, 3, **PLAIN)
    MISTAKES[name](monkeypatch)
    with pytest.raises((AssertionError, BlockOrderError, StateError)):
        compare(wanted, train(config_of(tmp_path, "vertical", 2, **BACKWARD, **EVERYTHING), 3))


@on_ranks(2)
def test_a_block_that_is_updated_before_the_gradients_of_all_ranks_is_found(rank, world_size, tmp_path):
    """Gradients of this rank are taken before those of the other one are there."""

    def take_own(_, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(world_size)[rank])

    wanted = train(config_of(None, "horizontal", 2), 2, rank)
    take_in_place_of_reductions(take_own)
    with pytest.raises(AssertionError):
        compare(wanted, train(config_of(tmp_path, "vertical", 2, **EVERYTHING), 2, rank))

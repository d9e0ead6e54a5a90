"""DeepSpeed's call sequence on the engine, against the same passes over plain FSDP2, bit for bit."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nvme_offload import OffloadAdamW, OffloadSGD, StateError, initialize, split_parameters
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same, full_state
from tests.support.small_engine import BF16, FP16, HYPERPARAMETERS, backward, fresh_model, loss_of, section

STEPS = 2


class Plain:
    """A loop over FSDP2 and the optimizer, with the engine's calls."""

    def __init__(self, accumulation):
        model = fresh_model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in [*model.blocks, model]:
            fully_shard(block, mp_policy=policy)
        split_parameters(model)
        self.module, self.accumulation = model, accumulation
        self.optimizer = OffloadAdamW(model.parameters(), **HYPERPARAMETERS, offload={"gradient_clipping": 0.5})

    def __call__(self, tokens):
        return self.module(tokens)

    def backward(self, loss, retain_graph=False, sync=True):
        self.module.set_requires_gradient_sync(sync)
        (loss / self.accumulation).backward(retain_graph=retain_graph)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


# Each sequence: stage, accumulation steps, one step of the engine, the same step of the plain loop.


def two_losses(model, rank, step, micro):
    return [loss_of(model, rank + 7 * number, step, micro) for number in range(2)]


def plain_backward(engine, rank, step):
    loss_of(engine, rank, step, 0).backward()
    engine.step()


def as_usual(engine, rank, step):
    backward(engine, rank, step)
    engine.step()


def scaled_backward(engine, rank, step):
    for micro in range(2):
        engine.scale(loss_of(engine, rank, step, micro)).backward()
        engine.step()


def several_losses(engine, rank, step):
    for micro in range(2):
        for loss in two_losses(engine, rank, step, micro):
            engine.backward(loss)
        engine.step()


def several_losses_plainly(plain, rank, step):
    for micro in range(2):
        for loss in two_losses(plain, rank, step, micro):
            plain.backward(loss)
    plain.update()


def one_graph(engine, rank, step):
    loss = loss_of(engine, rank, step, 0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss * 0.5)
    engine.step()


def one_graph_plainly(plain, rank, step):
    loss = loss_of(plain, rank, step, 0)
    plain.backward(loss, retain_graph=True)
    plain.backward(loss * 0.5)
    plain.update()


def without_sync(engine, rank, step):
    with engine.no_sync():
        engine.backward(loss_of(engine, rank, step, 0))
        with pytest.raises(RuntimeError, match=r"engine\.step was called within engine\.no_sync"):
            engine.step()
        assert all(param.grad is None for param in engine.parameters())
    engine.backward(loss_of(engine, rank, step, 1))
    engine.step()


def without_sync_plainly(plain, rank, step):
    for micro in range(2):
        plain.backward(loss_of(plain, rank, step, micro), sync=bool(micro))
    plain.update()


def own_boundary(engine, rank, step):
    for micro in range(3):
        engine.set_gradient_accumulation_boundary(micro == 2)
        assert engine.is_gradient_accumulation_boundary() is (micro == 2)
        engine.backward(loss_of(engine, rank, step, micro))
    engine.step()
    assert engine.global_steps == step + 1


def micro_batches_plainly(plain, rank, step, count=2):
    for micro in range(count):
        plain.backward(loss_of(plain, rank, step, micro))
    plain.update()


SEQUENCES = [
    (3, 1, plain_backward, partial(micro_batches_plainly, count=1)),
    (3, 2, as_usual, micro_batches_plainly),
    (3, 2, scaled_backward, micro_batches_plainly),
    (3, 2, several_losses, several_losses_plainly),
    (2, 1, one_graph, one_graph_plainly),
    (3, 1, one_graph, one_graph_plainly),
    (1, 1, without_sync, without_sync_plainly),
    (3, 2, own_boundary, partial(micro_batches_plainly, count=3)),
]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_every_sequence_gives_the_bits_of_plain_fsdp2(rank, world_size):
    for stage, accumulation, of_engine, of_plain in SEQUENCES:
        config = section(stage, **BF16, gradient_accumulation_steps=accumulation)
        plain = Plain(accumulation)
        with initialize(fresh_model(), config) as engine, plain.optimizer:
            for step in range(STEPS):
                of_engine(engine, rank, step)
                of_plain(plain, rank, step)
            assert engine.global_steps == STEPS
            assert engine.get_global_grad_norm() == plain.optimizer.total_norm
            assert_same(full_state(engine.module, engine.optimizer), full_state(plain.module, plain.optimizer))


@pytest.fixture
def make(alone):
    engines = []

    def make_engine(stage=3, **more):
        engines.append(initialize(fresh_model(), section(stage, **more)))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def test_a_plain_backward_that_lacks_something_is_refused_with_the_lines_to_write(make):
    for engine, words in (
        (make(), r"gradient_accumulation_steps = 2:"),
        (make(**FP16, gradient_accumulation_steps=1), r"= 1 and scales it for fp16:"),
    ):
        loss_of(engine, 0, 0, 0).backward()
        before = full_state(engine.module, engine.optimizer)
        with pytest.raises(RuntimeError, match=words + r" .*write\n    engine\.backward\(loss\)\n    engine\.step\(\)"):
            engine.step()
        assert_same(full_state(engine.module, engine.optimizer), before)
        engine.zero_grad()
        with pytest.raises(
            RuntimeError, match=r"called before engine\.backward: .*write\n    engine\.backward\(loss\)"
        ):
            engine.step()


def test_backward_returns_the_loss_as_divided(make):
    engine = make()
    loss = loss_of(engine, 0, 0, 0)
    assert torch.equal(engine.backward(loss), loss.detach() / 2)
    engine.step()
    loss = loss_of(engine, 0, 0, 1)
    assert torch.equal(engine.backward(loss, scale_wrt_gas=False), loss.detach())


def test_zero_grad_begins_the_step_anew_or_says_that_it_would_lose_gradients(make):
    engine, other = make(1), make(1)
    engine.zero_grad()
    engine.backward(loss_of(engine, 0, 5, 0))
    engine.step()
    with pytest.raises(
        RuntimeError, match=r"engine\.zero_grad was called with 1 of 2 micro-batches done.*leave it out"
    ):
        engine.zero_grad()
    engine.backward(loss_of(engine, 0, 5, 1))
    engine.zero_grad()
    assert engine.micro_steps == 0
    for one in (engine, other):
        for micro in range(2):
            one.backward(loss_of(one, 0, 0, micro))
            one.step()
        one.zero_grad()
    assert engine.global_steps == other.global_steps == 1
    assert_same(full_state(engine.module, engine.optimizer), full_state(other.module, other.optimizer))
    with pytest.raises(ValueError, match="set_to_none=False"):
        engine.zero_grad(set_to_none=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_of_stages_that_keep_parts_of_gradients_is_refused(make, stage):
    engine = make(stage)
    with (
        pytest.raises(RuntimeError, match=rf"stage {stage} keeps its part .*zero_optimization\.stage = 1"),
        engine.no_sync(),
    ):
        pass
    engine.backward(loss_of(engine, 0, 0, 0))
    assert all(param.grad is not None for param in engine.parameters())


def test_no_sync_ends_with_an_exception_too(make):
    engine = make(1, gradient_accumulation_steps=1)
    with pytest.raises(RuntimeError, match="within"), engine.no_sync(), engine.no_sync():
        pass
    engine.backward(loss_of(engine, 0, 0, 0))
    assert all(param.grad is not None for param in engine.parameters())
    engine.step()


def test_a_boundary_of_ones_own_holds_until_the_next_word(make):
    engine = make()
    engine.set_gradient_accumulation_boundary(True)
    for step in range(3):
        engine.backward(loss_of(engine, 0, step, 0))
        engine.step()
    assert engine.global_steps == 3
    engine.set_gradient_accumulation_boundary(False)
    for micro in range(5):
        engine.backward(loss_of(engine, 0, 0, micro))
        engine.step()
    assert (engine.global_steps, engine.micro_steps) == (3, 5)
    with pytest.raises(StateError, match="5 of 5 micro-batches done"):
        engine.save_checkpoint("nowhere")


def test_parameters_are_the_shards_also_after_an_evaluation(make):
    engine = make(2)
    with torch.no_grad():
        loss_of(engine, 0, 0, 0)  # gathered, and kept by stage 2
    optimized = engine.optimizer.param_groups[0]["params"]
    assert {id(param) for param in engine.parameters()} == {id(param) for param in optimized}
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in fresh_model().named_parameters()]


@pytest.mark.parametrize(
    ("make_optimizer", "line"),
    [
        (
            partial(OffloadAdamW, lr=3e-4, weight_decay=0.1, offload={}),
            "partial(OffloadAdamW, lr=0.0003, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1)",
        ),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "partial(OffloadSGD, lr=0.1, momentum=0.9, dampening=0"),
    ],
    ids=["ours", "torch's"],
)
def test_an_optimizer_that_is_made_already_is_refused_with_the_two_lines(alone, make_optimizer, line):
    model = fresh_model()
    made = make_optimizer(model.parameters())
    with pytest.raises(TypeError) as caught:
        initialize(model, section(), optimizer=made)
    written = str(caught.value)
    assert "from functools import partial\n    engine = initialize(model, config, optimizer=partial(" in written
    assert line in written
    names = {"partial": partial, "OffloadAdamW": OffloadAdamW, "OffloadSGD": OffloadSGD}
    given = eval(written[written.index("partial(Off") : -1], names)
    with initialize(model, section(), optimizer=given) as engine:
        assert engine.optimizer.param_groups[0]["lr"] == made.param_groups[0]["lr"]


MISTAKEN = {
    "initialize: model = a dict: write initialize": lambda model, section: initialize(section, model),
    "OffloadAdamW: params = a Model: pass model.parameters": lambda model, section: OffloadAdamW(
        model, offload=section
    ),
    "loss_of = a list, .* write engine.accumulate": lambda model, section: initialize(model, section).accumulate(
        [], len
    ),
    "a loss with a graph": lambda model, section: initialize(model, section).backward(torch.tensor(1.0)),
}


@pytest.mark.parametrize("words", MISTAKEN)
def test_a_call_with_something_else_says_what_to_write(words, alone):
    with pytest.raises((TypeError, RuntimeError), match=words):
        MISTAKEN[words](fresh_model(), section(0, **BF16))

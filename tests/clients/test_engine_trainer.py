"""Trainer and accelerate's loop over an engine, block by block with everything on NVMe: the bits of the plain loop."""

import itertools
import os
import signal
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from nvme_offload import CheckpointError, ConfigError, OffloadAdamW, OffloadConfig, initialize
from nvme_offload.adapters import OffloadTrainer, OffloadTrainerCallback
from tests.clients.test_trainers import METHODS, adapted, tokenizer
from tests.support.accelerated import forget, sharding_on_cpu
from tests.support.clients import WITH_A_LINE, client
from tests.support.ranks import be_alone, run_ranks
from tests.support.sharded_model import assert_same
from tests.support.small_llama import llama, rows
from tests.support.tiers import EVERYTHING, section

LR, COUNT = 1e-2, 3
BLOCKS = "`OffloadTrainer(engine, args, ...)`"


@pytest.fixture(autouse=True)
def group():
    be_alone()
    yield
    torch.distributed.destroy_process_group()
    forget()


def data(number=15):
    """Rows that have different numbers of labels; the last step of an epoch has fewer micro-batches than the others."""
    found = rows(number)
    for length, row in enumerate(found):
        row["labels"][: length % 13] = -100
    return found


def arguments(folder, kind=TrainingArguments, **more):
    settings = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": COUNT}
    settings |= {"learning_rate": LR, "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no"}
    return kind(output_dir=str(folder), use_cpu=True, report_to="none", **(settings | more))


def model(**more):
    made = llama()
    vars(made).update(more)
    return made


def engine_of(path, args, order="vertical", made=None, **more):
    tiers = EVERYTHING if order == "vertical" else {}
    config = section(path, **tiers) | {"micro_batch_order": order, "bf16": {"enabled": "auto"}, **more}
    config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    del config["optimizer"]
    return initialize(made or model(), OffloadConfig.from_training_arguments(config, args))


def logged(trainer):
    return [[entry[key] for entry in trainer.state.log_history if key in entry] for key in ("loss", "learning_rate")]


def stock(args, made=None, kind=Trainer, **more):
    """Losses, learning rates and weights of `Trainer`'s own loop, over a model in memory."""
    made = made or model()
    with OffloadAdamW(made.parameters(), lr=LR, weight_decay=0.0, offload={}) as optimizer:
        trainer = kind(model=made, args=args, optimizers=(optimizer, None), **{"train_dataset": data()} | more)
        trainer.train()
        return logged(trainer), {name: param.detach() for name, param in made.named_parameters()}


def norms(trainer):
    return [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]


def sums_of_negatives(outputs, labels, num_items_in_batch):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


LOSSES = {
    "by tokens": ({}, {}, {}),
    "by micro-batches": ({"accepts_loss_kwargs": False}, {}, {}),
    "smoothed": ({}, {"label_smoothing_factor": 0.1}, {}),
    "a function": ({}, {}, {"compute_loss_func": sums_of_negatives}),
}


@client("transformers", "`Trainer` over an engine, block by block, with everything on NVMe", WITH_A_LINE, BLOCKS)
@pytest.mark.parametrize("loss", ["by tokens", *(pytest.param(each, marks=pytest.mark.slow) for each in [*LOSSES][1:])])
def test_losses_and_weights_have_the_bits_of_trainers_loop(tmp_path, loss):
    of_model, of_args, of_trainer = LOSSES[loss]
    args = arguments(tmp_path, **of_args)
    wanted = stock(args, model(**of_model), **of_trainer)
    with engine_of(tmp_path, args, made=model(**of_model)) as engine:
        callback = OffloadTrainerCallback()
        trainer = OffloadTrainer(engine, args, train_dataset=data(), callbacks=[callback], **of_trainer)
        trainer.train()
        assert logged(trainer) == wanted[0]
        assert_same(dict(engine.weights("fp32")), wanted[1])
        assert engine.optimizer.stats().updates_behind > 0
        assert [entry["offload/steps"] for entry in trainer.state.log_history if "loss" in entry] == [*range(1, 7)]


@client(
    "PEFT", "LoRA in `Trainer` and `SFTTrainer` over an engine, block by block, saved as PEFT does", WITH_A_LINE, BLOCKS
)
def test_adapters_train_and_are_saved_as_peft_does(tmp_path):
    peft = pytest.importorskip("peft", reason="make clients installs it")

    def adapted():
        base = model()
        torch.manual_seed(1)
        return peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    best = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_only_model": True,
    }
    args = arguments(tmp_path, load_best_model_at_end=True, **best)
    wanted = stock(arguments(tmp_path), adapted())
    with engine_of(tmp_path, args, made=adapted()) as engine:
        trainer = OffloadTrainer(engine, args, train_dataset=data(), eval_dataset=data(2))
        trainer.train()
        assert logged(trainer) == wanted[0]
        loaded = peft.PeftModel.from_pretrained(model(), trainer.state.best_model_checkpoint)
        assert_same(dict(engine.weights("fp32")), dict(loaded.named_parameters()))


@client("TRL", "`DPOTrainer` over an engine with adapters, whose reference is the base", WITH_A_LINE, BLOCKS)
def test_the_reference_of_dpo_is_the_base_where_adapters_begin_as_zero(tmp_path):
    """TRL itself copies them; what begins otherwise is refused."""
    trl, (texts, special, _) = pytest.importorskip("trl", reason="make clients installs it"), METHODS["DPO"]
    given = {"train_dataset": pytest.importorskip("datasets").Dataset.from_list(texts), "processing_class": tokenizer()}
    args = arguments(tmp_path, partial(trl.DPOConfig, bf16=False, max_steps=3, **special))
    mine = type("Mine", (OffloadTrainer, trl.DPOTrainer), {})
    wanted = stock(args, adapted(), trl.DPOTrainer, **given)
    for order in ("horizontal", "vertical"):
        with engine_of(tmp_path, args, order, made=adapted()) as engine:
            trainer = mine(engine, args, **given)
            trainer.train()
            assert logged(trainer) == wanted[0]
            assert_same(dict(engine.weights("fp32")), {name: wanted[1][name] for name in dict(engine.weights("fp32"))})
            assert "ref" not in engine.module.peft_config
            with pytest.raises(ValueError, match=r"copies adapters that are no zeros to a new one, 'ref'.*ref_model"):
                mine(engine, args, **given)


@client("TRL", "its trainers over an engine, block by block", WITH_A_LINE, "`class Mine(OffloadTrainer, SFTTrainer)`")
@pytest.mark.parametrize("method", ["SFT", "DPO"])
def test_trainers_of_trl_have_the_bits_of_their_loop(tmp_path, method):
    trl = pytest.importorskip("trl", reason="make clients installs it")
    texts, special, parts = METHODS[method]
    given = {"train_dataset": pytest.importorskip("datasets").Dataset.from_list(texts[:15])}
    theirs, made = getattr(trl, f"{method}Trainer"), model()
    mine = type("Mine", (OffloadTrainer, theirs), {})
    args = arguments(tmp_path, partial(getattr(trl, f"{method}Config"), bf16=False, **special))
    wanted = stock(args, made, theirs, processing_class=tokenizer(), **given, **parts())
    with engine_of(tmp_path, args) as engine:
        trainer = mine(engine, args, processing_class=tokenizer(), **given, **parts())
        trainer.train()
        assert logged(trainer) == wanted[0]
        assert_same(dict(engine.weights("fp32")), wanted[1])


@client(
    "transformers", "`Trainer` over an engine: clipping, bf16, evaluation, resume, the best model", WITH_A_LINE, BLOCKS
)
def test_it_saves_and_resumes(tmp_path):
    """Clipped as the section says, whose norm is logged; the other run is not struck, and goes one by one in memory."""
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(tmp_path / "out", bf16=True, load_best_model_at_end=True, max_grad_norm=0.5, **saving)
    ends = []
    for order, resume in (("horizontal", None), ("vertical", f"{args.output_dir}/checkpoint-2")):
        with engine_of(tmp_path, args, order) as engine:
            trainer = OffloadTrainer(engine, args, train_dataset=data(), eval_dataset=data(4))
            trainer.train(resume_from_checkpoint=resume)
            ends.append((trainer.state.log_history[:-1], dict(engine.weights("fp32"))))
            assert trainer.optimizer.param_groups[0]["lr"] == 0
    for one, other in zip(*(history for history, _ in ends), strict=True):
        for key in [key for key in one if key.endswith(("_runtime", "_per_second"))]:
            del one[key], other[key]
        assert one == other
    assert_same(*(weights for _, weights in ends))
    assert min(norms(trainer)) > 0.5, "clipping acts"
    found = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.bfloat16)
    assert_same(dict(found.named_parameters()), {name: value.bfloat16() for name, value in ends[1][1].items()})


def test_of_saved_weights_alone_the_best_are_loaded_and_none_are_resumed(tmp_path):
    """The best is the one of the greatest loss, which is not the last; the optimizer's state of it is nowhere."""
    best = {"load_best_model_at_end": True, "greater_is_better": True, "learning_rate": 0.5}
    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = arguments(tmp_path / "out", save_only_model=True, **best, **every_step)
    made = model()
    made.generation_config.max_new_tokens = 7
    with engine_of(tmp_path, args, made=made) as engine:
        trainer = OffloadTrainer(engine, args, train_dataset=data(), eval_dataset=data(4))
        trainer.train()
        assert trainer.state.best_global_step < trainer.state.global_step
        best = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
        assert_same(dict(engine.weights("fp32")), dict(best.named_parameters()))
        assert best.generation_config.max_new_tokens == 7
        with pytest.raises(CheckpointError, match=r"checkpoint-6 has weights and no engine's checkpoint"):
            trainer.train(resume_from_checkpoint=True)


def train_on_ranks(rank, world_size, path):
    """torch's DDP in `Trainer`, and the engine's shards in ours: gradients are reduced once, and once a micro-batch."""
    with sharding_on_cpu():
        args = arguments(path / "out", max_grad_norm=0.5)
        found = [stock(args)[0]]
        for order in ("horizontal", "vertical"):
            with engine_of(path, args, order) as engine:
                trainer = OffloadTrainer(engine, args, train_dataset=data())
                trainer.train()
                found.append(logged(trainer))
                assert min(norms(trainer)) > 0.5
    return found


@pytest.mark.slow
def test_on_two_ranks_losses_are_those_of_ddp(tmp_path):
    for ddp, horizontal, vertical in run_ranks(train_on_ranks, 2, tmp_path):
        assert vertical == horizontal
        assert len(ddp[0]) == len(horizontal[0]) > 2
        torch.testing.assert_close(horizontal, ddp, rtol=0, atol=1e-5)


class Stopping(TrainerCallback):
    """Stops the run in the middle of a step."""

    def on_substep_end(self, args, state, control, **unused):
        control.should_training_stop = state.global_step == 1


class Failing(TrainerCallback):
    """Ends the run between the last backward of a step and its update."""

    def on_pre_optimizer_step(self, *unused, **more):
        raise KeyError


def test_what_does_not_go_together_is_said_and_a_run_that_was_stopped_goes_on(tmp_path):
    args = arguments(tmp_path)
    with engine_of(tmp_path, args) as engine:
        with pytest.raises(ConfigError, match=r"args\.max_grad_norm is 1\.0"):
            OffloadTrainer(engine, arguments(tmp_path, max_grad_norm=1.0))
        trainer = OffloadTrainer(engine, args, train_dataset=data(), callbacks=[Stopping()])
        trainer.train()
        assert engine.global_steps == trainer.state.global_step == 1
        trainer.pop_callback(Stopping)
        trainer.add_callback(Failing)
        with pytest.raises(KeyError):
            trainer.train()
        trainer.pop_callback(Failing)
        trainer.train()
        assert engine.global_steps == 1 + 6
    converting = arguments(tmp_path, bf16=True, bf16_full_eval=True)
    with engine_of(tmp_path, converting) as engine, pytest.raises(ValueError, match=r"leave out bf16_ and fp16_full"):
        OffloadTrainer(engine, converting)
    with (
        engine_of(tmp_path, args, scheduler={"type": "WarmupLR", "params": {}}) as engine,
        pytest.raises(ValueError, match=r"leave scheduler out"),
    ):
        OffloadTrainer(engine, args)


class Preempted(TrainerCallback):
    """A scheduler of jobs wants the machine back in the middle of the third step."""

    def __init__(self, where):
        setattr(self, where, self._send)
        self.trainer, self.is_sent = None, False

    def _send(self, args, state, control, **unused):
        if state.global_step == 2 and not self.is_sent:
            self.is_sent = True
            [saves] = [each for each in self.trainer.callback_handler.callbacks if hasattr(each, "jit_manager")]
            saves.jit_manager.kill_wait = 0
            os.kill(os.getpid(), signal.SIGTERM)
            while not saves.jit_manager.is_checkpoint_requested:  # by a timer of transformers
                time.sleep(0.01)


@contextmanager
def trainer_over(kind, folder, args, *callbacks):
    """A trainer, and what gives its weights."""
    if kind is OffloadTrainer:
        with engine_of(folder, args) as engine:
            yield (
                OffloadTrainer(engine, args, train_dataset=data(), callbacks=[*callbacks]),
                lambda: engine.weights("fp32"),
            )
    else:
        made = model()
        with OffloadAdamW(made.parameters(), lr=LR, offload=str(folder)) as optimizer:
            yield (
                Trainer(
                    model=made, args=args, train_dataset=data(), optimizers=(optimizer, None), callbacks=[*callbacks]
                ),
                lambda: ((name, param.detach().clone()) for name, param in made.named_parameters()),
            )


@client("transformers", "`enable_jit_checkpoint`: a checkpoint when SIGTERM comes, from which a run goes on")
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (Trainer, "on_step_end"),
        (OffloadTrainer, "on_pre_optimizer_step"),
        *(pytest.param(kind, "on_step_begin", marks=pytest.mark.slow) for kind in (Trainer, OffloadTrainer)),
        pytest.param(Trainer, "on_pre_optimizer_step", marks=pytest.mark.slow),
        pytest.param(OffloadTrainer, "on_step_end", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_told_to_end_saves_and_goes_on_with_the_same_bits(kind, where, tmp_path):
    args, before = arguments(tmp_path / "out", enable_jit_checkpoint=True), signal.getsignal(signal.SIGTERM)
    with trainer_over(kind, tmp_path, args) as (trainer, weights):
        trainer.train()
        expected = dict(weights())
    preempted = Preempted(where)
    with trainer_over(kind, tmp_path, args, preempted) as (trainer, _):
        preempted.trainer = trainer
        trainer.train()
        assert 2 <= trainer.state.global_step <= 3
    assert signal.getsignal(signal.SIGTERM) is before
    with trainer_over(kind, tmp_path, args) as (trainer, weights):
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 6
        assert_same(dict(weights()), expected)


@client("accelerate", "loop over an engine, block by block", WITH_A_LINE, "`engine.accumulate` takes a step's batches")
def test_accelerates_loop(tmp_path):
    """Its loop of `backward` for one micro-batch after the other, and the engine with the same batches."""
    forget()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=COUNT)
    batches = accelerator.prepare(DataLoader(data(18), batch_size=2))
    made = model()
    with OffloadAdamW(made.parameters(), lr=LR, weight_decay=0.0, offload={}) as optimizer:
        made, prepared = accelerator.prepare(made, optimizer)
        wanted = []
        for batch in batches:
            with accelerator.accumulate(made):
                wanted.append(made(**batch).loss)
                accelerator.backward(wanted[-1])
                prepared.step()
                prepared.zero_grad()
    with engine_of(tmp_path, arguments(tmp_path)) as engine:
        found, window = [], iter(batches)
        while micro_batches := [*itertools.islice(window, COUNT)]:
            found += engine.accumulate(lambda batch: engine(**batch, use_cache=False).loss, micro_batches)
            engine.step()
        assert found == wanted
        assert_same(dict(engine.weights("fp32")), {name: param.detach() for name, param in made.named_parameters()})

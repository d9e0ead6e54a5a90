"""Trainers of transformers, TRL and PEFT, each beside what people put into it, with hidden steps: as torch's AdamW."""

import copy
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from nvme_offload.adapters import OffloadTrainerCallback
from tests.support.clients import HIDES, UNCHANGED, WITH_A_LINE, assert_as_torch, client
from tests.support.small_llama import VOCABULARY, llama

STEPS, BY_A_CALLBACK = 4, "`OffloadTrainerCallback()`"


def tokenizer():
    names = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    made = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(start, number):
    return " ".join(f"w{3 + (7 * start + step) % (VOCABULARY - 3)}" for step in range(number))


def in_trainer(model, options, more):
    texts = [dict(tokenizer()(words(start, 3 + start % 9))) for start in range(16)]
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    args = TrainingArguments(**options)
    return Trainer(model=model, args=args, train_dataset=texts, eval_dataset=texts[:2], data_collator=collate, **more)


def in_trl(method, model, options, more):
    """Its classes are looked up by name, because `make test` may be without them."""
    trl = pytest.importorskip("trl", reason="make clients installs it")
    rows, special, parts = METHODS[method]
    data = pytest.importorskip("datasets").Dataset.from_list(rows)
    more = {"train_dataset": data, "eval_dataset": data.select(range(2)), "processing_class": tokenizer()} | more
    args = getattr(trl, f"{method}Config")(**options, **special)
    return getattr(trl, f"{method}Trainer")(model=model, args=args, **more, **parts())


def reward(completions, **given):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


TEXTS = [{"text": words(start, 3 + start % 9)} for start in range(16)]
PROMPTS = [{"prompt": words(start, 3)} for start in range(16)]
PAIRS = [row | {"chosen": words(n, 4), "rejected": words(n + 9, 4)} for n, row in enumerate(PROMPTS)]
METHODS = {
    "SFT": (TEXTS, {"max_length": 16}, dict),
    "DPO": (PAIRS, {"max_length": 16}, lambda: {"ref_model": llama()}),
    "GRPO": (PROMPTS, {"num_generations": 2, "max_completion_length": 4}, lambda: {"reward_funcs": reward}),
}


def adapted():
    peft = pytest.importorskip("peft", reason="make clients installs it")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


TRAINERS = {
    "Trainer": (client("transformers", "`Trainer`", UNCHANGED, HIDES), llama, in_trainer),
    "LoRA in Trainer": (client("PEFT", "LoRA in `Trainer`", UNCHANGED, HIDES), adapted, in_trainer),
    "SFTTrainer": (client("TRL", "`SFTTrainer`", UNCHANGED, HIDES), llama, partial(in_trl, "SFT")),
    "LoRA in SFTTrainer": (client("PEFT", "LoRA in `SFTTrainer`", UNCHANGED, HIDES), adapted, partial(in_trl, "SFT")),
    "DPOTrainer": (client("TRL", "`DPOTrainer`", UNCHANGED, HIDES), llama, partial(in_trl, "DPO")),
    "GRPOTrainer": (client("TRL", "`GRPOTrainer`", UNCHANGED, HIDES), llama, partial(in_trl, "GRPO")),
}

# Each returns options, a callback, and what tells the weights that the callback has made.


def alone(model):
    return {}, TrainerCallback(), dict


def figures(model):
    return {}, OffloadTrainerCallback(), dict


def bema(model):
    callback = pytest.importorskip("trl").BEMACallback(update_freq=1, lag=1)
    return {}, callback, lambda: callback.running_model.state_dict()


def reference(model):
    made, sync = copy.deepcopy(model), pytest.importorskip("trl.trainer.callbacks").SyncRefModelCallback
    return {}, sync(made, None), made.state_dict


def ema(model):
    """The average that people write themselves."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6))

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **given):
            average.update_parameters(model)

    return {}, Callback(), average.state_dict


def stopped(model):
    """The second evaluation ends the run, and the weights of the first are the best."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    best |= {"save_strategy": "steps", "save_steps": 1}
    return best, EarlyStoppingCallback(early_stopping_threshold=100.0), dict


def by_length(model):
    return {"train_sampling_strategy": "group_by_length"}, TrainerCallback(), dict


def resumed(model):
    return {"save_strategy": "steps", "save_steps": STEPS // 2}, TrainerCallback(), dict


BESIDE = {
    alone: client("transformers", "evaluation after each step, in all of these trainers"),
    figures: client("transformers", "figures in the logs, beside hidden steps", WITH_A_LINE, BY_A_CALLBACK),
    bema: client("TRL", "`BEMACallback` in all of these trainers (none with LoRA, which it does not take)"),
    reference: client("TRL", "`SyncRefModelCallback` in all of these trainers"),
    ema: client("torch", "`AveragedModel` in a callback of one's own, in all of transformers' and TRL's trainers"),
    stopped: client("transformers", "`EarlyStoppingCallback`, `load_best_model_at_end` in all of these trainers"),
    by_length: client("transformers", "`group_by_length` in `Trainer` and `SFTTrainer`"),
    resumed: client("transformers", "resume from a checkpoint in all of these trainers"),
}
NOT_MEANT_FOR = {bema: {"LoRA in Trainer", "LoRA in SFTTrainer"}, by_length: {"DPOTrainer", "GRPOTrainer"}}
"""They refuse or ignore these themselves, with any optimizer."""


def pairs():
    for trainer, (row, *_) in TRAINERS.items():
        for beside in BESIDE:
            slow = [] if trainer == "Trainer" and beside in (ema, stopped, resumed) else [pytest.mark.slow]
            if trainer not in NOT_MEANT_FOR.get(beside, ()):
                marks = [row, BESIDE[beside], *slow]
                yield pytest.param(trainer, beside, marks=marks, id=f"{trainer}-{beside.__name__}")


@pytest.mark.parametrize(("trainer", "beside"), [*pairs()])
def test_pairs(tmp_path, trainer, beside):
    _, make_model, make_trainer = TRAINERS[trainer]

    def run(make, folder, resume=None):
        model = make_model()
        special, callback, made = beside(model)
        options = {"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1}
        options |= {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 1}
        options |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "disable_tqdm": True} | special
        trainer = make_trainer(model, options, {"optimizers": (make(model), None), "callbacks": [callback]})
        trainer.args.ref_model_sync_steps, trainer.args.ref_model_mixup_alpha = 1, 0.6
        trainer.train(resume_from_checkpoint=resume)
        log = [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]
        ends = [log, dict(model.state_dict()), dict(made())]
        if beside is resumed and resume is None:
            torch.testing.assert_close(run(make, folder, f"{folder}/checkpoint-{STEPS // 2}"), ends, rtol=0, atol=0)
        return ends

    assert_as_torch(run, tmp_path)

"""Hugging Face's "auto": the values that `transformers.Trainer` puts in its place.

They come from any object with the attributes of ``transformers.TrainingArguments``; nothing is imported from there.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from ..errors import ConfigError


class _Argument(NamedTuple):
    """An argument stands for a key of the section: its value, and the attribute, or how it is computed."""

    value: Any
    name: str


def resolve(
    section: Mapping[str, Any], args: Any, num_training_steps: int | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Put a value in the place of each "auto" that the arguments decide; an "auto" that they do not decide stays.

    Returns the section, with AdamW and the arguments' hyperparameters where it names no optimizer; and what is wrong,
    by key: one that says something else than the arguments, or that needs `num_training_steps` of the whole run
    (``args.max_steps`` where that is positive). Raises ConfigError if `args` lacks an attribute.
    """
    if num_training_steps is None and getattr(args, "max_steps", 0) > 0:
        num_training_steps = args.max_steps
    try:
        arguments = _arguments(args, num_training_steps)
    except AttributeError as error:
        what = f"{error}; pass transformers.TrainingArguments, or an object with its attributes"
        raise ConfigError([f"args = {type(args).__name__}: {what}"]) from None
    resolved = deepcopy(dict(section))
    if resolved.get("optimizer") is None:
        names = ("lr", "betas", "eps", "weight_decay")
        params = {name: arguments[f"optimizer.params.{name}"].value for name in names}
        resolved["optimizer"] = {"type": "AdamW", "params": params}
    problems = {}
    for key, argument in arguments.items():
        home, name = _home_of(resolved, key)
        written = home.get(name)
        if written == "auto" and argument.value is None:
            problems[key] = f'{key} = "auto": {argument.name}; pass num_training_steps='
        elif written == "auto":
            home[name] = argument.value
        elif written is not None and argument.value is not None and written != argument.value and argument.name:
            what = f'{argument.name} is {argument.value}; write "auto", or the same in both'
            problems[key] = f"{key} = {written}: {what}"
    return resolved, problems


def _home_of(section: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section that a key is in, or an empty one where it is not there, and the name of the key in it."""
    *homes, name = key.split(".")
    inner: Any = section
    for home in homes:
        inner = inner.get(home) if isinstance(inner, dict) else None
    return inner if isinstance(inner, dict) else {}, name


def _arguments(args: Any, num_training_steps: int | None) -> dict[str, _Argument]:
    """Return what the arguments say of each key that they decide, as `HfTrainerDeepSpeedConfig` has it."""
    batch = args.per_device_train_batch_size
    train_batch = args.world_size * batch * args.gradient_accumulation_steps
    no_steps = "the steps of the run decide it"
    warmup = None if num_training_steps is None else max(1, args.get_warmup_steps(num_training_steps))
    return {
        "train_micro_batch_size_per_gpu": _Argument(batch, "args.per_device_train_batch_size"),
        "gradient_accumulation_steps": _Argument(args.gradient_accumulation_steps, "args.gradient_accumulation_steps"),
        "train_batch_size": _Argument(train_batch, "world size x micro-batch x accumulation steps of args"),
        "gradient_clipping": _Argument(args.max_grad_norm, "args.max_grad_norm"),
        "optimizer.params.lr": _Argument(args.learning_rate, "args.learning_rate"),
        "optimizer.params.betas": _Argument([args.adam_beta1, args.adam_beta2], "args.adam_beta1, adam_beta2"),
        "optimizer.params.eps": _Argument(args.adam_epsilon, "args.adam_epsilon"),
        "optimizer.params.weight_decay": _Argument(args.weight_decay, "args.weight_decay"),
        "scheduler.params.warmup_min_lr": _Argument(0, ""),  # no argument of the Trainer's
        "scheduler.params.warmup_max_lr": _Argument(args.learning_rate, "args.learning_rate"),
        "scheduler.params.warmup_num_steps": _Argument(warmup, "args.get_warmup_steps()" if warmup else no_steps),
        "scheduler.params.total_num_steps": _Argument(
            num_training_steps, "num_training_steps" if num_training_steps else no_steps
        ),
        "fp16.enabled": _Argument(args.fp16 or args.fp16_full_eval, "args.fp16 or fp16_full_eval"),
        "bf16.enabled": _Argument(args.bf16 or args.bf16_full_eval, "args.bf16 or bf16_full_eval"),
    }

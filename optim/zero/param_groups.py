"""Parameter groups of a model before it is sharded: by name, by pattern, or by the parameters that it has then."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from nvme_offload.offload.activations.blocks import find_blocks
from nvme_offload.offload.config.optimizer import OPTIMIZERS, OptimizerConfig, OptimizerGroup, OptimizerParams
from nvme_offload.offload.errors import ConfigError, ConfigWarning
from nvme_offload.offload.warn import warn_user
from ..layout.blocks import params_matching
from ..rules.muon import BESIDE_MATRICES, Muon
from ..rules.rule import UpdateRule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group whose parameters are known by name, so that sharding may exchange them."""

    names: Sequence[str]
    options: Mapping[str, Any]
    """Hyperparameters of its own."""
    rule: UpdateRule


def groups_of(
    model: nn.Module, section: OptimizerConfig, rule: UpdateRule, given: Iterable[Mapping[str, Any]] | None
) -> list[NamedGroup]:
    """Return the groups of a model's parameters: those that no group names come first, with the optimizer's options.

    Beside Muon's matrices each group has a second one, with AdamW. Groups that are `given` replace the section's.
    """
    if given is None:
        wanted = [_Wanted.of_section(model, number, group) for number, group in enumerate(section.groups)]
    else:
        wanted = [_Wanted.of_argument(model, number, group) for number, group in enumerate(given)]
    names = {param: name for name, param in model.named_parameters()}
    owners: dict[nn.Parameter, _Wanted] = {}
    for group in wanted:
        for param in group.params:
            if (other := owners.setdefault(param, group)) is not group:
                raise group.error(f"{names[param]} is in {other.place}, too; a parameter has one group")
    rest = [param for param in names if param not in owners]
    groups: list[tuple[Iterable[nn.Parameter], Mapping[str, Any]]] = [(rest, {})] if rest else []
    groups += [(group.params, group.options) for group in wanted]
    is_muon = isinstance(rule, Muon)
    if is_muon:
        groups = _with_adamw_beside(groups, params_beside_matrices(model), section.params)
    named = [([names[param] for param in params], options) for params, options in groups]
    return [NamedGroup(own, options, rule.of(options) if is_muon else rule) for own, options in named]


def params_beside_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters for which Muon is not: what is no matrix, embeddings and heads, with all that is tied.

    A head is what a Hugging Face model calls its output embeddings, or a linear layer beside the repeated layers with
    as many outputs as an embedding has rows.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    num_rows = {module.num_embeddings for module in embeddings}
    inside = {module for block in find_blocks(model) for module in block.modules()}
    heads: list[nn.Module] = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module not in inside and module.out_features in num_rows
    ]
    output: Callable[[], object] | None = getattr(model, "get_output_embeddings", None)
    if output is not None and isinstance(head := output(), nn.Module):
        heads.append(head)
    ends = {param for module in (*embeddings, *heads) for param in module.parameters()}
    return ends | {param for param in model.parameters() if param.ndim != 2}


def log_groups(groups: Iterable[NamedGroup], optimizer: torch.optim.Optimizer) -> None:
    """Say which parameter went where, where there is more than one group."""
    if len(optimizer.param_groups) < 2:
        return
    for number, (group, made) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        said = ", ".join(f"{key} {made[key]}" for key in ("rule", "lr", "weight_decay") if key in made)
        logger.info("parameter group %d (%s): %s", number, said, ", ".join(group.names))


@dataclass(frozen=True)
class _Wanted:
    """A group as somebody asked for it."""

    place: str
    params: Mapping[nn.Parameter, None]
    options: Mapping[str, Any]
    error: Callable[[str], ValueError]

    @classmethod
    def of_section(cls, model: nn.Module, number: int, group: OptimizerGroup) -> Self:
        place = f"optimizer.groups[{number}]"

        def error(what: str) -> ValueError:
            return ConfigError([f"{place}: {what}"])

        return cls(place, _found(model, group.match, error), group.hyperparameters, error)

    @classmethod
    def of_argument(cls, model: nn.Module, number: int, group: Mapping[str, Any]) -> Self:
        place = f"param_groups[{number}]"

        def error(what: str) -> ValueError:
            return ValueError(f"initialize: {place}: {what}")

        if not isinstance(group, Mapping) or "params" not in group:
            raise error('is no parameter group; write {"params": names, patterns or parameters, "lr": ...}')
        params = group["params"]
        asked = [params] if isinstance(params, str | torch.Tensor) else list(params)
        options = {key: value for key, value in group.items() if key != "params"}
        return cls(place, _found(model, asked, error), options, error)


def _found(
    model: nn.Module, asked: Iterable[object], error: Callable[[str], ValueError]
) -> Mapping[nn.Parameter, None]:
    own = dict.fromkeys(model.parameters())
    found: dict[nn.Parameter, None] = {}
    for each in asked:
        if isinstance(each, str):
            matching = params_matching(model, each)
            if not matching:
                names = ", ".join(name for name, _ in list(model.named_parameters())[:5])
                raise error(f'"{each}" names no module or parameter of this model; its parameters are {names}, ...')
            found |= matching
        elif isinstance(each, nn.Parameter) and each in own:
            found[each] = None
        else:
            shape = f" of shape {tuple(each.shape)}" if isinstance(each, torch.Tensor) else ""
            raise error(f"a {type(each).__name__}{shape} is no parameter of this model, and no name or pattern of one")
    return {param: None for param in own if param in found}


def _with_adamw_beside(
    groups: Iterable[tuple[Iterable[nn.Parameter], Mapping[str, Any]]],
    beside: set[nn.Parameter],
    params: OptimizerParams,
) -> list[tuple[Iterable[nn.Parameter], Mapping[str, Any]]]:
    """Split each group that does not say its rule; a rate of Muon's own is none of AdamW's."""
    lr = params.adam_lr
    if lr is None and params.muon_lr is not None:
        lr = OPTIMIZERS["Muon"]["lr"] if params.lr is None else params.lr
    adamw = {name: value for name, value in (("lr", lr), ("eps", params.eps)) if value is not None}
    has_muons = lr is None and params.lr is not None and params.adjust_lr_fn != "match_rms_adamw"
    split: list[tuple[Iterable[nn.Parameter], Mapping[str, Any]]] = []
    for members, options in groups:
        if "rule" in options:
            split.append((members, {**adamw, **options} if options["rule"] == "AdamW" else options))
            continue
        matrices = [param for param in members if param not in beside]
        others = [param for param in members if param in beside]
        split += [(matrices, {"rule": "Muon", **options}), (others, {**BESIDE_MATRICES, **adamw, **options})]
        if others and has_muons and "lr" not in options:
            said = f"AdamW, for what is no matrix, has Muon's lr = {params.lr}"
            warn_user(f"optimizer.params: {said}; write adam_lr, which is often smaller", ConfigWarning)
    return [(members, options) for members, options in split if members]

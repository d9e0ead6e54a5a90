"""Take values from a model's own initialisers: some modules at a time in host memory, the same on every rank."""

import sys
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import own_initializer, refuse_writes, version_of
from nvme_offload.offload.shards.split_tensor import SplitTensor
from ..ranks.collective import device_of
from .adapters import adapter_units, initialize_adapters
from .new_tensors import BirthPlan, NewTensor, has_new_value

Init = Callable[[nn.Module], object]

_REMEDY = "give its class a reset_parameters() that does, or pass init= to initialize()"


class Initializers:
    """Fills the parameters and buffers of each module.

    A Hugging Face model's ``_init_weights`` does it; where that leaves something out, and in other models, the
    module's ``reset_parameters``. Then the user's function `init`. Buffers end up on `device`.
    """

    def __init__(self, model: nn.Module, plan: BirthPlan, init: Init | None, device: torch.device) -> None:
        self._plan = plan
        self._init = init
        self._device = device
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._hugging_face = _hugging_face_models(model)
        self._model = model
        self._of_adapters = {module for unit in adapter_units(model) for module in unit}

    def run(self, unit: Sequence[nn.Module], place: Callable[[NewTensor, torch.Tensor], None] | None) -> None:
        """Give some modules whole parameters, initialise them, hand the values on, and take the memory back.

        `unit` has modules in the order in which they are initialised, without their children. `place` gets each
        parameter and its whole value on the CPU; None where only buffers are wanted. ValueError: nobody fills a
        parameter or buffer, or an initialiser writes to what is not in `unit`.
        """
        with _WholeParameters(self._plan, unit) as whole:
            buffers = self._make_buffers(unit)
            for module in unit:
                self._initialize(module, for_buffers=place is None)
        for new, value in whole.items() if place is not None else ():
            if value.isnan().any():
                raise ValueError(_nobody_fills([new]))
            assert place is not None
            place(new, value)
        for new, version, placeholder in buffers:
            if not has_new_value(new.current, version, placeholder):
                raise ValueError(_nobody_fills([new]))
            new.set_buffer(new.current.to(self._device))

    def _make_buffers(self, unit: Sequence[nn.Module]) -> list[tuple[NewTensor, int, torch.Tensor]]:
        made = []
        for module in unit:
            for new in self._plan.unborn_buffers(module):
                placeholder = torch.zeros(new.shape, dtype=new.dtype, device="cpu")
                new.set_buffer(placeholder)
                made.append((new, version_of(placeholder), placeholder))
        return made

    def _initialize(self, module: nn.Module, *, for_buffers: bool) -> None:
        name = self._names[module]
        message = (
            f"initialize: initialising {name} ({type(module).__name__}) writes to a parameter that is not in memory at "
            "that time, because it belongs to another block. Pass init= with a function that fills the parameters of "
            "one module at a time, or name larger blocks="
        )
        with torch.no_grad(), torch.device("cpu"), refuse_writes(_is_elsewhere, None if for_buffers else message):
            self._initialize_own(module)
            if self._init is not None:
                self._init(module)

    def _initialize_own(self, module: nn.Module) -> None:
        owner, reset = self._hugging_face.get(module), own_initializer(module)
        if module in self._of_adapters:
            if hasattr(module, "lora_A"):
                initialize_adapters(self._model, module)
            elif reset is not None:
                reset()
        elif owner is not None:
            owner._init_weights(module)  # type: ignore[operator]  # Hugging Face's name for what models override
            left_out = any(param.isnan().any() for param in module.parameters(recurse=False))
            if left_out and reset is not None:
                reset()
                owner._init_weights(module)  # type: ignore[operator]
        elif reset is not None:
            reset()


def check_initializers(model: nn.Module, wanted: Iterable[NewTensor]) -> None:
    """Find early what no initialiser can fill, because neither its module nor one around it has any.

    Raises:
        ValueError: names the parameters and buffers.
    """
    filled = set(_hugging_face_models(model))
    for module in model.modules():  # parents first
        if own_initializer(module) is not None:
            filled.update(module.modules())
    if orphans := [new for new in wanted if new.module not in filled]:
        raise ValueError(_nobody_fills(orphans))


def _nobody_fills(orphans: Sequence[NewTensor]) -> str:
    listed = [f"{new.name} of shape {tuple(new.shape)} (in {type(new.module).__name__})" for new in orphans[:4]]
    more = f" and {len(orphans) - 4} more" if len(orphans) > 4 else ""
    return f"initialize: no initialiser gives a value to {', '.join(listed)}{more}: {_REMEDY}"


def _hugging_face_models(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the nearest Hugging Face model around each module; nothing is imported for that."""
    found: dict[nn.Module, nn.Module] = {}
    if (library := sys.modules.get("transformers.modeling_utils")) is not None:
        for module in model.modules():  # parents first: the nearest is the last to claim a module
            if isinstance(module, library.PreTrainedModel):
                found.update(dict.fromkeys(module.modules(), module))
    return found


class SharedRandomNumbers:
    """Draws the same random numbers on every rank: those of the first one.

    A rank whose generator stood where the first one's did goes on behind the numbers drawn, as after an ordinary
    construction; one that had a state of its own gets it back.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._own = self._common = torch.get_rng_state()

    def __enter__(self) -> None:
        common = self._own.clone()
        for dimension in range(self._mesh.ndim):
            group = self._mesh.get_group(dimension)
            sent = common.to(device_of(group))
            dist.broadcast(sent, group=group, group_src=0)
            common = sent.cpu()
        self._common = common
        torch.set_rng_state(common)

    def __exit__(self, *exception: object) -> None:
        if not torch.equal(self._own, self._common):
            torch.set_rng_state(self._own)


class _WholeParameters:
    """Puts real parameters, full of NaN, in the place of shards; of tied weights the first in the unit counts."""

    def __init__(self, plan: BirthPlan, unit: Sequence[nn.Module]) -> None:
        self._plan, self._unit = plan, unit
        self._shards: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __enter__(self) -> dict[NewTensor, torch.Tensor]:
        whole: dict[NewTensor, torch.Tensor] = {}
        try:
            for module in self._unit:
                for name, shard in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                    new = self._plan.param_at[module, name]
                    value = torch.full(new.shape, torch.nan, dtype=new.dtype, device="cpu")
                    self._shards.append((module, name, shard))
                    module.register_parameter(name, nn.Parameter(value, requires_grad=shard.requires_grad))
                    whole.setdefault(new, value)
            return whole
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        for module, name, shard in self._shards:
            module.register_parameter(name, shard)


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether writing to it would be lost, or reach this rank's shard alone."""
    return tensor.is_meta or isinstance(tensor, DTensor | SplitTensor)

"""One block's part in one micro-batch: it is computed in forward, of which no graph stays, and once more for backward.

Between the two stay its inputs (the boundary) and what it takes to do the same again. Gradients of what it gave come
together in `Arriving`, and those of its inputs go to where they came from.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nvme_offload.offload._torch_private import tree_flatten, tree_unflatten, version_of
from nvme_offload.offload.activations.buffers import Buffers
from nvme_offload.offload.activations.choice import is_plain
from nvme_offload.offload.activations.kept import counter_of
from nvme_offload.offload.devices.device import autocast_dtype, is_host
from nvme_offload.offload.errors import BlockOrderError

_PLAIN = (
    *(torch.Tensor, int, float, complex, bool, str, bytes, Enum, type(None)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, slice),
)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kept(Protocol):
    """A tensor that is kept for later."""

    def take(self) -> torch.Tensor:
        """Return the tensor, once: it is kept no longer."""


class Keeper(Protocol):
    """Boundaries and their gradients stay here until backward comes to them."""

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor that nobody changes."""

    def announce(self, handles: Iterable[Kept]) -> None:
        """Say in which order these are taken next."""


class KeptInMemory:
    """Keeps tensors where they are."""

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor that nobody changes."""
        return _Here(tensor)

    def announce(self, handles: Iterable[Kept]) -> None:
        """Do nothing: they are here."""


class _Here:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensors = [tensor]

    def take(self) -> torch.Tensor:
        return self._tensors.pop()


class Arriving:
    """The gradient of a tensor, from all that used it, in the order in which backward comes to them.

    Backward goes on with `tensor`; None stands for something that a block gave, which is computed again first.
    """

    def __init__(self, keeper: Keeper, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self._keeper = keeper
        self.so_far: Kept | None = None

    def give(self, grad: torch.Tensor) -> None:
        """Add a gradient."""
        before = self.take()
        self.so_far = self._keeper.keep(grad if before is None else before + grad)

    def take_from(self, leaf: torch.Tensor) -> None:
        """Add what autograd left in a leaf: a hook of the leaf, which must not depend on who holds it."""
        if leaf.grad is not None:
            self.give(leaf.grad)
            leaf.grad = None

    def take(self) -> torch.Tensor | None:
        """Return what has come, which is None where nothing has."""
        kept, self.so_far = self.so_far, None
        return kept.take() if kept is not None else None


class Arguments:
    """The tensors that a block is given, which are needed as they are once more."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(counter_of(one) if is_plain(one) else one, version_of(one)) for one in tensors]
        self.stand_ins: list[weakref.ref[torch.Tensor]] = []
        """Tensors of the forward in the place of those with gradients, as long as anybody has the graph of that."""

    @property
    def have_changed(self) -> bool:
        """Whether one was changed in place since."""
        return any(version_of(counter) != version for counter, version in self._versions)


class BlockCall:
    """A block is called in a micro-batch; BlockOrderError if computing it twice may change an argument."""

    def __init__(
        self,
        block: nn.Module,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source_of: Callable[[torch.Tensor], Arriving],
    ) -> None:
        self.block = block
        self._name = name
        for value in (args, kwargs):
            self._check(value, "is given")
        self._leaves, self._layout = tree_flatten((args, kwargs))
        self._check_leaves(self._leaves, "is given")
        self._sources = {at: source_of(leaf) for at, leaf in enumerate(self._leaves) if _needs_grad(leaf)}
        self.arguments = Arguments(self._tensors())
        self._boundary: dict[int, Kept] = {}
        self._arriving: dict[int, Arriving] = {}
        self._sums: list[int] | None = None
        self.computes_again_by_itself = False
        """Whether something in the block was computed once more inside its backward, as a checkpoint does."""
        device = next((leaf.device for leaf in self._tensors()), None) or next(block.parameters()).device
        self._random = _Random(device)
        self._autocast = autocast_dtype(device.type)

    @property
    def is_trained(self) -> bool:
        """Whether backward comes through it."""
        return bool(self._sources) or any(param.requires_grad for param in self.block.parameters())

    def forward(self, keeper: Keeper, *, looks: bool) -> Any:
        """Compute the block, leave no graph, and keep what it takes to do so again.

        Tensors in the result that need a gradient are leaves. A block that changes an argument or a buffer is refused;
        with `looks` also another result in `backward`, and what no version counter tells of.
        """
        # With a graph, which ends here: operators choose kernels by whether somebody will need a gradient.
        sources = self._sources
        leaves = [leaf.detach().requires_grad_() if at in sources else leaf for at, leaf in enumerate(self._leaves)]
        self.arguments.stand_ins.extend(weakref.ref(leaves[at]) for at in sources)
        self.check_arguments()
        buffers = Buffers(self.block.named_modules())
        before, device = random_states(self._random.device), self._random.device
        output = self._compute(leaves)
        if any(not torch.equal(*pair) for pair in zip(before, random_states(device), strict=True)):
            self._random.note(before)
        if changed := buffers.changed(compares=looks):
            buffers.put_back()
            raise self._refusal(f"changes its buffer {changed}, and would do so twice")
        self.check_arguments("changes an argument, and would do so twice")
        given, layout = tree_flatten(output)
        self._check_leaves(given, "gives")
        if not self.is_trained:
            self._leaves, self._sources = [], {}
            return output
        self._boundary = {at: keeper.keep(leaves[at].detach()) for at in self._sources}
        self._leaves = [None if at in self._sources else leaf for at, leaf in enumerate(leaves)]
        self._sums = _sums_of_bits(given) if looks else None
        for at, value in enumerate(given):
            if _needs_grad(value):
                self._arriving[at] = Arriving(keeper)
                given[at] = value.detach().requires_grad_()
                given[at].register_post_accumulate_grad_hook(self._arriving[at].take_from)
        return tree_unflatten(given, layout)

    def check_arguments(self, why: str = "is given a tensor that was changed in place since") -> None:
        """Raise BlockOrderError if an argument is not as it was in the call: it is needed once more, after others."""
        if self.arguments.have_changed:
            raise self._refusal(why)

    def kept(self) -> Iterator[Kept]:
        """Return what `backward` will take, in its order, as far as it has come."""
        sums = (arriving.so_far for arriving in self._arriving.values())
        return chain(self._boundary.values(), (kept for kept in sums if kept is not None))

    def outputs(self, output: Any) -> Iterator[tuple[torch.Tensor, Arriving]]:
        """Return the leaves in what `forward` returned, each with where its gradient comes together."""
        given, _ = tree_flatten(output)
        return ((given[at], arriving) for at, arriving in self._arriving.items())

    def backward(self) -> None:
        """Compute the block again and go backward through it. Gradients of its arguments go where they came from."""
        leaves = list(self._leaves)
        for at, kept in self._boundary.items():
            leaves[at] = kept.take().detach().requires_grad_()
        with self._random:
            output = self._compute(leaves)
        given, _ = tree_flatten(output)
        if self._sums is not None and _sums_of_bits(given) != self._sums:
            why = "gives something else when it is computed again: it keeps something, or draws random numbers that "
            raise self._refusal(f"{why}torch does not know of")
        pairs = [(given[at], arriving.take()) for at, arriving in self._arriving.items()]
        found = [(one, grad) for one, grad in pairs if grad is not None]
        called: list[nn.Module] = []
        hook = None
        if self._sums:
            hook = register_module_forward_pre_hook(lambda module, _: called.append(module))
        try:
            with torch.autocast(self._random.device.type, enabled=False):
                torch.autograd.backward([one for one, _ in found], [grad for _, grad in found])
        finally:
            if hook is not None:
                hook.remove()
        self.computes_again_by_itself = bool(called)
        for at, source in self._sources.items():
            if leaves[at].grad is not None:
                source.give(leaves[at].grad)

    def _compute(self, leaves: Sequence[Any]) -> Any:
        """Call the block in the autocast state of its call, which remembers no weights that it has cast."""
        args, kwargs = tree_unflatten(list(leaves), self._layout)
        dtype, kind = self._autocast, self._random.device.type
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False):
            return self.block(*args, **kwargs)

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))

    def _check(self, value: object, verb: str) -> None:
        """Raise BlockOrderError for a value that may hold tensors out of sight, or be changed by who gets it."""
        if isinstance(value, list | tuple):
            for item in value:
                self._check(item, verb)
        elif isinstance(value, dict):
            self._check([*value, *value.values()], verb)
        else:
            self._check_leaves([value], verb)

    def _check_leaves(self, values: Sequence[object], verb: str) -> None:
        for value in values:
            if not isinstance(value, _PLAIN):
                why = f"{verb} a {type(value).__name__}, which is filled twice if the block is computed twice"
                raise self._refusal(f"{why}. If it is a key-value cache, call the model with use_cache=False")

    def _refusal(self, why: str) -> BlockOrderError:
        return BlockOrderError(f"block {self._name} {why}")


class _Random:
    """Inside, random numbers are those of noted `states`; afterwards they go on as before. None: nothing is drawn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states: Sequence[torch.Tensor] | None = None

    def note(self, states: Sequence[torch.Tensor]) -> None:
        self.states = states

    def __enter__(self) -> None:
        if self.states is not None:
            self._before = random_states(self.device)
            set_random_states(self.device, self.states)

    def __exit__(self, *error: object) -> None:
        if self.states is not None:
            set_random_states(self.device, self._before)


def _needs_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that a computation on a device draws from."""
    states = [torch.get_rng_state()]
    return states if is_host(device) else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_random_states(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    """Set what `random_states` returned."""
    torch.set_rng_state(states[0])
    if not is_host(device):
        torch.get_device_module(device).set_rng_state(states[1], device)


def _sums_of_bits(values: Sequence[object]) -> list[int]:
    tensors = [value.detach().contiguous() for value in values if isinstance(value, torch.Tensor)]
    kinds = [_BITS.get(tensor.element_size(), torch.int64) for tensor in tensors]
    return [int(one.view(kind).sum(dtype=torch.int64)) for one, kind in zip(tensors, kinds, strict=True)]

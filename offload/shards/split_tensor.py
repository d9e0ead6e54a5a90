"""A parameter shard as an fp32 tensor whose parts live apart: what is gathered, and what its master has besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .._torch_private import Offered, is_view, make_wrapper, recorded, tree_flatten, tree_unflatten, written_tensors
from .stand_in import MemorylessTensor


class Parts(Protocol):
    """Parts know where those of an fp32 tensor are, and how to put them together and apart."""

    @property
    def device(self) -> torch.device:
        """Device that the tensor is gathered from."""

    def gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what is gathered, in the padded shape that FSDP2 gathers and in `dtype`; valid until `end_gather`."""

    def offered(self, gathered: torch.Tensor) -> Offered:
        """Return for how long what `gathered` gave is there."""

    def end_gather(self) -> None:
        """Let what is gathered go: FSDP2 has copied it."""

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Return what is stored, in the shard's shape, without padding; a stand-in where it is on a tier."""

    def read(self) -> torch.Tensor:
        """The parts joined: a new plain fp32 tensor in the shard's shape."""

    def write(self, values: torch.Tensor) -> None:
        """Divide fp32 values of the shard's shape among the parts."""


class _View(NamedTuple):
    """One step from a tensor to a view of it."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None
    """The place of this view among those that the operator returns; None: it returns one."""

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.op(tensor, *self.args, **self.kwargs)
        view: torch.Tensor = result if self.item is None else result[self.item]
        return view


class _Source:
    """A source gives the value of a tensor: joined parts, and the views that lead from there to the tensor."""

    def __init__(self, parts: Parts, views: tuple[_View, ...], owner: int) -> None:
        self.parts = parts
        self.views = views
        self._owner = owner

    def joined(self) -> torch.Tensor:
        """The value, joined: an ordinary fp32 tensor."""
        return self.through(self.parts.read())

    def through(self, base: torch.Tensor) -> torch.Tensor:
        """The value of the view, taken from a joined base."""
        for view in self.views:
            base = view.apply(base)
        return base

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Fill the plain copy of the tensor, which its copier has made and noted in `memo`; it needs no source.

        ``dcp.async_save`` copies so: it takes a tensor without memory for an empty one, and copies its attributes.
        """
        copied = memo.get(self._owner)
        if not isinstance(copied, torch.Tensor) or isinstance(copied, SplitTensor):
            raise TypeError("the parts of a split parameter cannot be copied: copy the parameter, which gives a tensor")
        copied.copy_(self.joined())


class SplitTensor(MemorylessTensor):
    """A read-through, write-through fp32 tensor.

    It holds no data of its own. Every operator joins the parts first; an operator that works in place splits the result
    back; views stay views. So state dicts are fp32 and conventional, and ``copy_``, ``load_state_dict`` and stock
    optimizers do what they say. Clones and factories (``zeros_like``) give plain tensors, as do serialization and
    DLPack. FSDP2 gathers what is stored for it alone, through its all-gather extension. A frozen parameter that is kept
    as it came, as of a quantized base, declares its own dtype in place of fp32, also after it was unfrozen.

    Reading one costs a pass over its parts, which may have to come from a drive: the training step never does it.
    """

    _source: _Source

    @staticmethod
    def __new__(cls, parts: Parts, like: torch.Tensor, views: tuple[_View, ...] = ()) -> SplitTensor:
        """Wrap `parts`; shape, strides and dtype are those of `like` (a meta tensor will do)."""
        tensor: SplitTensor = make_wrapper(cls, like, parts.device, like.dtype)
        tensor._source = _Source(parts, views, id(tensor))
        return tensor

    @property
    def parts(self) -> Parts:
        """Return where the data of the tensor is."""
        return self._source.parts

    def use_parts(self, parts: Parts) -> None:
        """Exchange where the data of the tensor is; the value must be the same."""
        self._source.parts = parts

    def plain(self) -> torch.Tensor:
        """Return an ordinary fp32 tensor of the same value, sharing nothing."""
        return self.joined().clone()

    def joined(self) -> torch.Tensor:
        """Return an ordinary fp32 tensor of the same value; of a view, with the memory of all it is a view of."""
        return self._source.joined().to(self.dtype)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"SplitTensor(shape={tuple(self.shape)}, gathered from {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.plain()

    def __dlpack__(self, *, copy: bool | None = None, **asked: Any) -> Any:
        """Give a capsule of a plain fp32 copy; raises BufferError if `copy` is False: no memory is shared."""
        if copy is False:
            raise BufferError(str(self.refusal("DLPack with copy=False")))
        plain = self.plain().requires_grad_(self.requires_grad)  # torch refuses to export a tensor that requires grad
        return plain.__dlpack__(**asked)

    def _whose(self) -> tuple[str, str]:
        return "a parameter whose parts live apart", "read a copy of it (`.clone()`), and write with `.copy_()`"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what FSDP2 gathers: what is stored, padded, in the policy's dtype; and for how long it is there."""
        with recorded("nvme_offload: gather"):
            gathered = self.parts.gathered(mp_policy.param_dtype or self.dtype)
            return (gathered,), self.parts.offered(gathered)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return what FSDP2 computes with: what was gathered as it is, in the buffer in which it arrived."""
        (gathered,) = all_gather_outputs
        self.parts.end_gather()
        if gathered.dtype is torch.uint8:  # it came as bytes
            gathered = gathered.view(self.dtype)
        return None if out is not None else (gathered, ())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on joined parts, and split back what it changed."""
        kwargs = kwargs or {}
        if is_view(func) and isinstance(args[0], SplitTensor):
            return _lazy_view(func, args[0], tuple(args[1:]), kwargs)
        if func in _FACTORIES and isinstance(args[0], SplitTensor):
            return func(torch.empty_like(args[0]._meta(), device=args[0].device), *args[1:], **kwargs)
        return _run_joined(func, args, kwargs)

    def _meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")


def _lazy_view(func: Any, source: SplitTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes, views = func(source._meta(), *args, **kwargs), source._source.views
    if isinstance(shapes, torch.Tensor):
        return SplitTensor(source.parts, shapes, (*views, _View(func, args, kwargs, None)))
    items = [(shape, _View(func, args, kwargs, number)) for number, shape in enumerate(shapes)]
    return [SplitTensor(source.parts, shape, (*views, view)) for shape, view in items]


def _run_joined(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Join every argument, run, split back what was written; a result that is an argument stays that argument."""
    bases: dict[int, torch.Tensor] = {}
    joined: dict[int, torch.Tensor] = {}

    def join(leaf: Any) -> Any:
        if not isinstance(leaf, SplitTensor):
            return leaf
        key = id(leaf.parts)
        if key not in bases:
            bases[key] = leaf.parts.read().to(leaf.dtype)
        if id(leaf) not in joined:
            joined[id(leaf)] = leaf._source.through(bases[key])
        return joined[id(leaf)]

    leaves, layout = tree_flatten((tuple(args), kwargs))
    plain_args, plain_kwargs = tree_unflatten([join(leaf) for leaf in leaves], layout)
    result = func(*plain_args, **plain_kwargs)
    changed = [leaf for leaf in written_tensors(func, args, kwargs) if isinstance(leaf, SplitTensor)]
    written = {id(leaf.parts): leaf.parts for leaf in changed}
    for key, parts in written.items():
        parts.write(bases[key])
    originals = {id(joined[id(leaf)]): leaf for leaf in leaves if isinstance(leaf, SplitTensor)}
    results, result_layout = tree_flatten(result)
    return tree_unflatten([originals.get(id(item), item) for item in results], result_layout)


_FACTORIES = {
    getattr(torch.ops.aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
}
"""Operators that need no data of their argument."""

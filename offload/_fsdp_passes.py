"""The passes of FSDP2 go another way here, by names that torch does not promise to keep. Each says why it is needed.

The tests of the engine compare what comes of them with the plain passes, bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ._torch_private import Offered, fsdp_param_groups, fsdp_params, local_tensor, sharded_like

_lending: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Whether a group is gathered for a block that takes turns now: of a graph with its parameters nothing stays then."""

_asking: WeakKeyDictionary[torch.nn.Module, tuple[Callable[..., list[int]], dict[int, int]]] = WeakKeyDictionary()
"""It asks the ranks of a model, and says which number each of its groups has; see `reduce_alike`."""


def begin_at(root: Any) -> None:
    """Let FSDP2 know its root (``FSDPState._lazy_init``), for which it takes what runs forward first: a block may."""
    root._get_fsdp_state()._lazy_init()


class Freezing:
    """Parameters of a model are frozen and unfrozen as well while FSDP2 shows gathered ones in their place.

    ``FSDPParam.to_unsharded`` copies ``requires_grad`` from the shard. What is said afterwards of either is lost: of
    the gathered one when it is freed (``FSDPParamGroup._to_sharded``), of the shard as long as it is not, which is how
    an evaluation leaves the root, and every part of stages 0 to 2.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._agreed: WeakKeyDictionary[Any, list[bool]] = WeakKeyDictionary()
        """The value that both had when they were last the same, by group."""
        for group in {id(group): group for module in root.modules() for group in fsdp_param_groups(module)}.values():
            group._to_unsharded = partial(self._after, group, group._to_unsharded)
            group._to_sharded = partial(self._before, group, group._to_sharded)
        root.register_forward_pre_hook(self._agree_everywhere, prepend=True)  # before FSDP2's, which keeps what it has

    def _after(self, group: Any, to_unsharded: Callable[[], None]) -> None:
        to_unsharded()  # it copies what the shard says: both are the same
        self._agreed[group] = [record.sharded_param.requires_grad for record in group.fsdp_params]

    def _before(self, group: Any, to_sharded: Callable[[], None]) -> None:
        self._agree(group)  # before nothing shows the gathered ones any more
        to_sharded()

    def _agree_everywhere(self, *_: object) -> None:
        for group in list(self._agreed):
            self._agree(group)

    def _agree(self, group: Any) -> None:
        """Set both as the one that was changed."""
        if not group.is_unsharded or group not in self._agreed:
            return
        agreed = self._agreed[group]
        for at, record in enumerate(group.fsdp_params):
            both = record.sharded_param, record._unsharded_param
            if both[0].requires_grad is not both[1].requires_grad:
                for param in both:
                    param.requires_grad_(not agreed[at])  # one of them was changed to this
            agreed[at] = both[0].requires_grad


def drop_unsharded_grads(model: torch.nn.Module) -> None:
    """Forget the gradients that FSDP2 keeps before it reduces them: accumulated, or left by a pass that was cut off.

    ``FSDPParam.unsharded_accumulated_grad`` and the gradient of ``FSDPParam._unsharded_param``, which is made when it
    is first gathered: ``zero_grad`` reaches sharded gradients alone, and ``reset_iter_state`` leaves these. From torch
    2.15 on the first is a property that shows the second.
    """
    for module in model.modules():
        for record in fsdp_params(module):
            _take_unsharded_grad(record)


@torch.no_grad()
def _take_unsharded_grad(fsdp_param: Any) -> torch.Tensor | None:
    """The gradient of a gathered parameter, with what was added up before; FSDP2 has none any more."""
    if not hasattr(fsdp_param, "_unsharded_param"):  # before the first forward
        return None
    latest: torch.Tensor | None = fsdp_param._unsharded_param.grad
    earlier: torch.Tensor | None = None
    # From 2.15 on it shows `latest`, which would be counted twice.
    if not isinstance(getattr(type(fsdp_param), "unsharded_accumulated_grad", None), property):
        earlier, fsdp_param.unsharded_accumulated_grad = fsdp_param.unsharded_accumulated_grad, None
    fsdp_param._unsharded_param.grad = None
    if earlier is None or latest is None:
        return latest if earlier is None else earlier
    return earlier.add_(latest)  # into the earlier one, as FSDP2 adds: it has the dtype of the reduction


def _largest_base(block: torch.nn.Module) -> list[Any]:
    """Return the group of a block that has most frozen bytes, if every use frees it; none where the block has no base.

    It holds one staging buffer. Others of the block, which may be gathered meanwhile, must do with one more.
    """
    groups = {id(group): group for module in block.modules() for group in fsdp_param_groups(module)}

    def frozen(group: Any) -> list[Any]:
        return [record for record in group.fsdp_params if not record.sharded_param.requires_grad]

    def size(group: Any) -> int:
        return sum(record.sharded_param.numel() * record.sharded_param.itemsize for record in frozen(group))

    base = max(groups.values(), key=size, default=None)
    if base is None or not (base._reshard_after_forward and base.reshard_after_backward):
        return []  # it would keep the buffer from other blocks
    others = (group for group in groups.values() if group is not base)
    return [base] if all(len(frozen(group)) in (0, len(group.fsdp_params)) for group in others) else []


class TakingTurns:
    """Let the passes of several micro-batches go through `blocks` of one FSDP2 model by turns.

    FSDP2 knows of one forward at a time, frees what it gathered after every call, and reduces what any group has at the
    end of every backward. While turns are taken, a forward that waits is put aside, and whoever takes them says when a
    group is freed, and when it is reduced.
    """

    # Private names of FSDP2 in torch 2.11 to 2.15. test_torch_private.py finds one that is gone, test_block_by_block.py
    # compares the rest with the plain loop, and counts or harms (1) to (3) besides:
    # (1) test_a_block_is_gathered_twice_however_many_micro_batches_there_are
    # (2) test_what_one_rank_cannot_do_is_done_by_none    (3) test_a_mistake_is_found
    #
    # group.reshard (1)                             does nothing, or each micro-batch would gather again
    # group.unshard (2)                             the ranks agree first, or some would wait for the others for ever
    # state and group._training_state               put aside with each forward, or it would go on as another one
    # state._modules_to_run_forward                 the same
    # context.iter_forward_root                     the same
    # .post_backward_final_callback_queued          True, or each backward would reduce all there is, whole or not
    # .manual_backward_finalization_active (2.15)   False, or `end` would raise, as nobody has said how a backward ends
    # state._root_post_backward_final_callback      called by `end`, or nothing else ends the passes
    # group.post_backward (3)                       called where autograd has not, or gradients would be reduced late
    # group._to_sharded                             called by `free`, or all would stay gathered until `end`
    # record._unsharded_param.grad (3)              exchanged between micro-batches, or some would be added twice
    # group._post_forward_indices,                  cleared after a pass, or what came before in a forward would be
    #   comm_ctx.post_forward_order                 gathered ahead, and here something else comes next

    def __init__(self, root: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> None:
        others = {root, *(module for block in blocks for module in block.modules())}
        parts = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self.units: list[Any] = [module for module in parts if module not in others]
        """Modules that gather by themselves and are neither the root nor in a block."""
        self._root: Any = root
        self._bases = [group for block in blocks for group in _largest_base(block)]
        self._is_under_way = False
        alone: tuple[Any, dict[int, int]] = (None, {})  # one rank asks nobody
        self._ask, self._numbers = _asking.get(root, alone)
        for group in {id(group): group for module in root.modules() for group in fsdp_param_groups(module)}.values():
            group.reshard = partial(self._reshard, group.reshard)
            group.unshard = partial(self._unshard, group, group.unshard)

    def _reshard(self, reshard: Callable[[], None]) -> None:
        if not self._is_under_way:
            reshard()

    def _unshard(self, group: Any, unshard: Callable[[bool], None], async_op: bool = False) -> None:
        """Gather only what all ranks gather: one alone may go through other blocks, or have found that it cannot."""
        if self._ask and self._is_under_way and not group.is_unsharded and group._all_gather_result is None:
            self._ask(self._numbers[id(group)])
        unshard(async_op)

    def refuse(self, why: str) -> None:
        """Tell the other ranks why this one cannot take turns."""
        if self._ask:
            self._ask(2 * len(self._numbers), refusal=why)

    @property
    def _context(self) -> Any:
        return self._root._get_fsdp_state()._state_ctx

    def _lend(self, lends: bool) -> None:
        for group in self._bases:
            _lending[group] = lends

    def begin(self) -> None:
        """Free and reduce nothing by itself from here on."""
        self._is_under_way = True
        self._lend(True)
        self._context.post_backward_final_callback_queued = True
        self._context.manual_backward_finalization_active = False

    def end(self) -> None:
        """End all passes: do what FSDP2 does after the last backward of a step."""
        self._is_under_way = False  # first: the callback frees what is gathered, by `reshard`
        self._lend(False)
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def stop(self) -> None:
        """Leave FSDP2 to itself again, wherever an exception came; ``reset_iter_state`` does the rest. Idempotent."""
        self._is_under_way = False
        self._lend(False)
        self._context.post_backward_final_callback_queued = False
        self._context.manual_backward_finalization_active = None

    def put_aside(self) -> Any:
        """Take FSDP2's record of the forward that runs, for `take_up`. Another one may begin."""
        modules = [self._root, *self.units]  # no block runs while a forward waits
        states = [module._get_fsdp_state() for module in modules]
        owners = [*states, *(group for module in modules for group in fsdp_param_groups(module))]
        training = [(one, one._training_state) for one in owners]
        to_run = [(state, set(state._modules_to_run_forward)) for state in states]
        aside = training, to_run, self._context.iter_forward_root
        for one in owners:
            one._training_state = type(one._training_state).IDLE
        for state in states:
            state._modules_to_run_forward.clear()  # the set itself: FSDP2's hooks have it
        self._context.iter_forward_root = None
        return aside

    def take_up(self, aside: Any) -> None:
        """Go on with the forward that was put aside."""
        training, to_run, self._context.iter_forward_root = aside
        for one, state in training:
            one._training_state = state
        for owner, waiting in to_run:
            owner._modules_to_run_forward.update(waiting)

    def end_pass(self, modules: Sequence[torch.nn.Module], *, reduces: bool) -> None:
        """End these modules' part in a pass. With `reduces` their gradients are whole, for one micro-batch."""
        for module in modules:
            for group in fsdp_param_groups(module):
                if reduces and group._training_state.name != "POST_BACKWARD":  # else it reduced by itself
                    group.post_backward()
                group._training_state = type(group._training_state).IDLE  # the next micro-batch's are not reduced yet
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()  # in PRE_BACKWARD a forward counts as a checkpoint's
                state._training_state = type(state._training_state).IDLE
        for module in (*modules, *self.units, self._root):
            for group in fsdp_param_groups(module):
                group._post_forward_indices.clear()
        self._root._get_fsdp_state()._comm_ctx.post_forward_order.clear()

    def free(self, modules: Sequence[torch.nn.Module], *, after_forward: bool) -> None:
        """Free what was gathered for these modules, where their stage frees it after a forward, or after a backward."""
        for group in (group for module in modules for group in fsdp_param_groups(module)):
            if group._reshard_after_forward if after_forward else group.reshard_after_backward:
                group._to_sharded()  # `reshard` does nothing now

    def gathered(self, module: torch.nn.Module) -> list[tuple[Any, torch.Tensor]]:
        """Return the records of what a module gathers (not its children), with the parameters that autograd sees."""
        records = fsdp_params(module)
        return [(record, record._unsharded_param) for record in records if hasattr(record, "_unsharded_param")]

    def out_of_order(self, inside: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
        """Return what backward comes to only through its own module: shards, and what is gathered `inside` blocks."""
        shards = [record.sharded_param for module in self._root.modules() for record in fsdp_params(module)]
        return shards + [param for module in inside for _, param in self.gathered(module)]

    @torch.no_grad()
    def exchange(self, gradients: Sequence[tuple[Any, torch.Tensor | None]]) -> list[tuple[Any, torch.Tensor | None]]:
        """Give gathered parameters these gradients, which are not reduced yet, in place of theirs; returns theirs."""
        before = [(record, record._unsharded_param.grad) for record, _ in gradients]
        for record, grad in gradients:
            record._unsharded_param.grad = grad
        return before

    @torch.no_grad()
    def add_up(self, earlier: Sequence[tuple[Any, torch.Tensor | None]]) -> None:
        """Add what gathered parameters have now to these gradients of earlier micro-batches; they get the sum."""
        for record, grad in earlier:
            latest = record._unsharded_param.grad
            if grad is not None:
                record._unsharded_param.grad = grad if latest is None else grad.add_(latest)


def hook_outputs(module: torch.nn.Module, tensors_in: Callable[[object], Iterable[torch.Tensor]]) -> None:
    """Have backward through an FSDP2 module (not its children) begin with every tensor in what its forward returns.

    ``FSDPState._register_pre_backward_hook``, ``_pre_backward``: torch hooks the tensors in tuples, lists and dicts,
    from 2.13 on those in dataclasses, and not one in any other object. ``Tensor._backward_hooks`` says which it did.
    """
    if not isinstance(module, FSDPModule):
        return
    state: Any = module._get_fsdp_state()
    hook_known = partial(type(state)._register_pre_backward_hook, state)  # its modules may be several

    def hook_all(output: Any) -> Any:
        output = hook_known(output)
        if torch.is_grad_enabled():
            tensors = (tensor for tensor in tensors_in(output) if tensor.requires_grad)
            hook_known([one for one in tensors if state._pre_backward not in (one._backward_hooks or {}).values()])
        return output

    state._register_pre_backward_hook = hook_all
    state._pre_backward = partial(_pre_backward, state._pre_backward, fsdp_param_groups(module))


def _pre_backward(begin: Callable[[torch.Tensor], torch.Tensor], groups: Sequence[Any], grad: torch.Tensor) -> Any:
    """Begin a backward. Torch computes it with gradients on for ``create_graph``: its graph would read freed memory."""
    # A rank alone that computes with its shard's own memory frees none.
    if torch.is_grad_enabled() and any(record.all_gather_outputs for group in groups for record in group.fsdp_params):
        raise RuntimeError(
            "create_graph=True: the graph of this backward would read gathered parameters, which are freed behind it. "
            "Gradients of gradients need one rank, parameters that stay in memory (offload_param none), and no autocast"
        )
    return begin(grad)


def reduce_alike(model: torch.nn.Module, of_any: Callable[[list[str], int, list[bool], str], list[int]]) -> None:
    """Let all ranks reduce the same parameters: who has no gradient of one that another rank has one of gives zeros.

    ``FSDPParamGroup.post_backward`` (2.11 to 2.15) reduces what this rank has gradients of, one behind the other. Where
    an expert is idle on one rank, it adds gradients of different parameters, or waits for ever. `of_any` is told the
    modules that gather, this one's number, and what there is a gradient of: it asks the other ranks. `TakingTurns` asks
    with ``len(names)`` more before it gathers, and with twice that, and why, where this rank cannot take turns.
    """
    modules = model.named_modules()
    named = {id(group): (name, group) for name, module in modules for group in fsdp_param_groups(module)}
    names = [name for name, _ in named.values()]
    most = max((len(group.fsdp_params) for _, group in named.values()), default=0)

    def ask(number: int, has: Sequence[bool] = (), refusal: str = "") -> list[int]:
        return of_any(names, number, [*has, *[False] * (most - len(has))], refusal)

    def post_backward(number: int, group: Any, reduce: Callable[[], None], *unused: Any) -> None:
        has = [_has_grad(record) for record in group.fsdp_params]
        asked = ask(number, has) if group.reduce_grads else has
        for record, is_here, is_anywhere in zip(group.fsdp_params, has, asked, strict=False):  # answers have `most`
            if is_anywhere and not is_here:
                param = record._unsharded_param
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype or param.dtype)
        reduce()

    for number, (_, group) in enumerate(named.values()):
        group.post_backward = partial(post_backward, number, group, group.post_backward)
    _asking[model] = ask, {key: len(names) + number for number, key in enumerate(named)}


def after_each_backward(model: torch.nn.Module, call: Callable[[], None]) -> None:
    """Call something when FSDP2 has ended a backward: ``FSDPState._root_post_backward_final_callback``, whose ever."""

    def end(end_backward: Callable[[], None]) -> None:
        end_backward()
        call()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # of each: the first that backward comes to queues its own
            state._root_post_backward_final_callback = partial(end, state._root_post_backward_final_callback)


def _has_grad(fsdp_param: Any) -> bool:
    gathered = getattr(fsdp_param, "_unsharded_param", None)
    return gathered is not None and (gathered.grad is not None or fsdp_param.unsharded_accumulated_grad is not None)


def compute_on_shards(module: torch.nn.Module) -> None:
    """Let a module (not its children) that is sharded over one rank compute with its shards, and train them.

    ``FSDPParamGroup.unshard``, ``wait_for_unshard``, ``post_backward``: for a group of one rank FSDP2 (2.11 to 2.15)
    copies every shard into a gathered parameter, and every gradient four times: into the input of a reduction, into its
    output, to the dtype of the shard, and to that of the partition. Here a gathered parameter is the shard's own memory
    (where a cast is due, or the memory is only lent, a copy), and ``p.grad`` is the gradient that autograd made. A
    module with tensor-parallel parameters is left as it is.
    """
    for group in fsdp_param_groups(module):
        if not any(record.is_dtensor for record in group.fsdp_params):
            alone = _GroupOfOne(group)
            group.unshard = alone.unshard
            group.wait_for_unshard = alone.wait_for_unshard
            group.post_backward = alone.post_backward
            group._to_sharded = alone.to_sharded


class _Lent(NamedTuple):
    """A group of one rank computes with this next, in the place of an ``AllGatherResult``, which FSDP2 waits for."""

    shards: dict[Any, tuple[torch.Tensor, Offered]]
    """The memory of each shard, or of its copy on a device, by FSDP2's record of it."""
    all_gather_event: Any
    """Behind what brings it to a device."""
    all_gather_work: None = None


class _GroupOfOne:
    """These take the place of four methods of an ``FSDPParamGroup`` of one rank.

    On a device, what is not there sets out on FSDP2's copy-in stream as soon as it is known to be needed
    (``FSDPCommContext.get_all_gather_streams``, ``FSDPParamGroup._all_gather_result``): before the device has come to
    where it is needed, and in backward one group ahead. Its memory belongs to that stream, which takes it back when the
    computing stream has copied it out of there.

    On the CPU a block that takes turns computes with what is lent of frozen parameters, until FSDP2 frees them
    (``FSDPParamGroup._to_sharded``): no second copy of a large base is made. What is trained is copied.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._end_backward = group.post_backward
        self._free = group._to_sharded
        self._borrowed: list[tuple[Any, torch.Tensor, int, Callable[[bool], None]]] = []
        """Records of frozen parameters that lie in memory that was lent, where they lie else, with no bytes now, the
        version of each, and how to give it back."""

    def unshard(self, async_op: bool = False) -> None:
        group = self._group
        if group.is_unsharded or group._all_gather_result is not None or group.device.type == "cpu":
            return  # on the CPU there is nothing to send
        stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with group.device_handle.stream(stream):
            shards = self._ask()
        group._all_gather_result = _Lent(shards, stream.record_event())

    def wait_for_unshard(self) -> None:
        group = self._group
        if group.is_unsharded:
            return
        if group.device.type == "cpu":
            self._unshard_from(self._ask())
            return
        self.unshard()
        group.device_handle.current_stream().wait_event(group._all_gather_result.all_gather_event)
        self._unshard_from(group._all_gather_result.shards)
        group._all_gather_result = None
        computing = group.device_handle.current_stream().record_event()  # behind the copies out of what was sent
        for stream in (group.comm_ctx.all_gather_copy_in_stream, group.comm_ctx.all_gather_stream):
            stream.wait_event(computing)  # what is sent next may get the memory of what was sent

    def _ask(self) -> dict[Any, tuple[torch.Tensor, Offered]]:
        """Ask for all before the first is answered: it is held until then. What is frozen may be large: it is first."""
        records = sorted(self._group.fsdp_params, key=lambda record: record.sharded_param.requires_grad)
        return {record: _asked(record) for record in records}

    def _unshard_from(self, asked: Mapping[Any, tuple[torch.Tensor, Offered]]) -> None:
        self._give_back()  # of a gather that an exception cut off before FSDP2 freed it
        shards, lent = {}, {}
        for record in asked:
            shard, (stays, lend) = asked[record]
            borrows = _lending.get(self._group) and not record.sharded_param.requires_grad
            lent[record] = lend(self._copy_borrowed) if lend and borrows else None
            shards[record] = _shard_or_copy(record, shard, stays, copies=lent[record] is None)
        for record in asked:
            _unshard_alone(record, shards[record])
            if (loan := lent[record]) is not None:
                self._borrow(record, *loan)
        self._group._to_unsharded()

    @torch.no_grad()
    def _borrow(self, record: Any, memory: torch.Tensor, end: Callable[[bool], None]) -> None:
        record.free_unsharded_param()  # or there were two copies of a base
        param = record._unsharded_param
        self._borrowed.append((record, param.data, param._version, end))  # first: what cuts this short is given back
        param.data = memory.view(param.dtype).as_strided(param.shape, param.stride())

    @torch.no_grad()
    def _copy_borrowed(self) -> None:
        """Compute with copies from here on: the memory is needed. Nothing computes at this moment."""
        for record, before, _, _ in self._borrowed:
            record.alloc_all_gather_outputs()
            record._unsharded_param.data = before.copy_(record._unsharded_param.data)
        self._borrowed = []

    def to_sharded(self) -> None:
        self._free()  # first: then no module shows what is given back
        self._give_back()

    def _give_back(self) -> None:
        borrowed, changed = self._borrowed, False
        for record, before, version, _ in borrowed:
            changed |= record._unsharded_param._version != version  # a forward wrote there: it has to be read again
            record._unsharded_param.data = before
        self._borrowed = []  # before `end`, which is called once
        for *_, end in borrowed[:1]:  # for all
            end(changed)

    def post_backward(self, *unused: Any) -> None:
        group = self._group
        # FSDP2 itself reduces for whoever asked it to divide, or to call him; without gradients it only reshards.
        if group.reduce_grads and group.gradient_divide_factor is None and group._all_reduce_hook is None:
            for record in group.fsdp_params:
                if (grad := _take_unsharded_grad(record)) is not None:
                    _give_grad(record, grad)
        self._end_backward()  # last: it frees, and finds nothing to reduce


@torch.no_grad()
def _asked(fsdp_param: Any) -> tuple[torch.Tensor, Offered]:
    """Return what a lone rank gathers, and ``ExtensionsData.all_gather_metadata`` of ours."""
    if hasattr(local_tensor(fsdp_param.sharded_param), "fsdp_pre_all_gather"):
        [shard] = fsdp_param.all_gather_inputs
        offered = fsdp_param._extensions_data.all_gather_metadata
        return shard, offered if isinstance(offered, Offered) else Offered(bool(offered))
    return fsdp_param._sharded_param_data, Offered(fsdp_param.param_dtype is None)


@torch.no_grad()
def _shard_or_copy(fsdp_param: Any, shard: torch.Tensor, stays: bool, *, copies: bool) -> torch.Tensor | None:
    """The memory of a shard that its rank can compute with; None where it got a copy of it, or a place without one.

    What stands in ``FSDPParam.all_gather_outputs`` FSDP2 frees when it reshards: never the memory of a shard.
    """
    gathered = getattr(fsdp_param, "_unsharded_param", None)
    was_shard = not fsdp_param.all_gather_outputs
    if gathered is not None and (was_shard != stays or (stays and gathered.data_ptr() != shard.data_ptr())):
        del fsdp_param._unsharded_param  # of memory that is no longer the shard's
        fsdp_param.all_gather_outputs = []
    if stays:
        return shard
    if not fsdp_param.all_gather_outputs or gathered is None:
        has_cast = hasattr(local_tensor(fsdp_param.sharded_param), "fsdp_pre_all_gather")
        dtype = shard.dtype if has_cast else fsdp_param.param_dtype or shard.dtype
        fsdp_param.all_gather_outputs = [torch.empty(shard.numel(), dtype=dtype, device=shard.device)]
    if not copies:  # a place without bytes: what is lent comes there
        return None
    fsdp_param.alloc_all_gather_outputs()
    [copy] = fsdp_param.all_gather_outputs
    with torch.autograd._unsafe_preserve_version_counter(copy):  # type: ignore[attr-defined]
        copy.copy_(shard)  # what autograd has saved is as it was
    return None


@torch.no_grad()
def _unshard_alone(fsdp_param: Any, shard: torch.Tensor | None) -> None:
    """Make the gathered parameter of one rank from what `_shard_or_copy` gave."""
    if shard is None:
        fsdp_param.init_unsharded_param()
        return
    fsdp_param.all_gather_outputs = [shard]
    try:
        fsdp_param.init_unsharded_param()
    finally:  # or FSDP2 would free the shard
        fsdp_param.all_gather_outputs = []


@torch.no_grad()
def _give_grad(fsdp_param: Any, grad: torch.Tensor) -> None:
    """Add the gradient of one rank to its shard's, rounded as a reduction would, and call who waits for it.

    ``Tensor._post_accumulate_grad_hooks``: FSDP2 itself calls them, as autograd knows nothing of the shard.
    """
    param = fsdp_param.sharded_param
    if fsdp_param.reduce_dtype in (torch.bfloat16, torch.float16):
        grad = grad.to(fsdp_param.reduce_dtype)  # to fp32 it would lose nothing
    if param.grad_dtype is not None:
        grad = grad.to(param.grad_dtype)
    if param.grad is None:
        param.grad = sharded_like(grad.contiguous(), param)
    else:
        param.grad._local_tensor += grad
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


def gather_outside_inference_mode(module: torch.nn.Module) -> None:
    """Have a module (not its children) gather ordinary tensors, also where its first forward is in inference mode.

    ``FSDPParamGroup.unshard``, ``wait_for_unshard``: FSDP2 (2.11 to 2.15) makes a gathered parameter once. One that is
    made in inference mode cannot be trained, and not even be written by the next gather.
    """
    for group in fsdp_param_groups(module):
        group.unshard = partial(_outside_inference_mode, group.unshard)
        group.wait_for_unshard = partial(_outside_inference_mode, group.wait_for_unshard)


def _outside_inference_mode(call: Callable[..., None], *arguments: Any, **named: Any) -> None:
    if not torch.is_inference_mode_enabled():
        call(*arguments, **named)
        return
    with torch.inference_mode(False), torch.no_grad():  # the first alone turns gradients on
        call(*arguments, **named)


def gather_by_itself(fsdp_param: Any, policy: MixedPrecisionPolicy) -> None:
    """Give one parameter of an FSDP2 group a gather dtype of its own, as all others of the group must have then.

    ``FSDPParam.init_dtype_attrs``: FSDP2 takes the dtypes of all parameters of a group from the group's policy when it
    first runs. ``FSDPParam.init_unsharded_param``: the gathered parameter, whose gradient has to be fp32 because a
    group's gradients have one dtype, is made when it is first gathered.
    """
    fsdp_param.mp_policy = policy
    orig_dtype, init_unsharded_param = fsdp_param.sharded_param.dtype, fsdp_param.init_unsharded_param

    def init_dtype_attrs(of_group: MixedPrecisionPolicy) -> None:
        fsdp_param.orig_dtype = orig_dtype
        fsdp_param.param_dtype = None if policy.param_dtype == orig_dtype else policy.param_dtype
        fsdp_param.reduce_dtype = policy.reduce_dtype

    def init_and_take_fp32_gradients() -> None:
        init_unsharded_param()
        fsdp_param.unsharded_param.grad_dtype = torch.float32

    fsdp_param.init_dtype_attrs = init_dtype_attrs
    fsdp_param.init_unsharded_param = init_and_take_fp32_gradients

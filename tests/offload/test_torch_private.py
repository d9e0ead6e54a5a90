"""One test per private torch name that is used: a torch that changed it fails here, by name."""

import ast
import pickle
import re
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, _fully_shard, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint as checkpointing

from nvme_offload.offload import _fsdp_passes
from nvme_offload.offload import _torch_private as private
from nvme_offload.offload._fsdp_passes import compute_on_shards, hook_outputs
from tests.support.ranks import be_alone, run_ranks

aten = torch.ops.aten


def test_is_transformed():
    assert torch.func.vmap(lambda x: x * private.is_transformed())(torch.ones(2)).tolist() == [1, 1]
    assert not private.is_transformed()


def test_base_of():
    """Views of one tensor share its version, those that FSDP2 makes without autograd, too."""
    with torch.no_grad():
        whole = torch.zeros(4)
        first, second = torch.as_strided(whole, (2,), (1,), 0), torch.as_strided(whole, (2,), (1,), 2)
    assert private.base_of(first) is private.base_of(second) is whole
    assert private.base_of(whole) is None
    before = private.version_of(first)
    second += 1
    assert private.version_of(first) > before
    with torch.inference_mode():
        assert private.version_of(torch.ones(1)) == 0


def test_recorded():
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiled, private.recorded("a part"):
        torch.ones(1)
    assert "a part" in {event.key for event in profiled.key_averages()}


def test_is_view():
    assert private.is_view(aten.view.default)
    assert private.is_view(aten.detach.default)
    assert not private.is_view(aten.clone.default)
    assert not private.is_view(aten.add_.Tensor)


def test_written_arguments():
    assert private.written_arguments(aten.add_.Tensor) == [0]
    assert private.written_arguments(aten.add.out) == ["out"]
    assert private.written_arguments(aten._foreach_add_.Scalar) == [0]
    assert private.written_arguments(aten.add.Tensor) == []


def test_written_tensors():
    one, two, three = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    for op, args, kwargs in (
        (aten.add_.Tensor, (one, two), {}),
        (aten.add.out, (two, three), {"out": one}),
        (aten._foreach_add_.List, ([one], [two]), {}),
    ):
        (found,) = private.written_tensors(op, args, kwargs)
        assert found is one


def test_own_initializer():
    assert private.own_initializer(torch.nn.ReLU()) is None
    for module in (torch.nn.Linear(2, 2), torch.nn.MultiheadAttention(2, 1)):
        weight = next(module.parameters())
        torch.nn.init.constant_(weight, 7)
        private.own_initializer(module)()
        assert not (weight == 7).any()


def test_refuse_writes():
    kept, free = torch.zeros(2), torch.zeros(2)
    with private.refuse_writes(lambda tensor: tensor.data_ptr() == kept.data_ptr(), "kept"):
        free.add_(kept)
        for write in (kept.add_, kept.data.add_, kept[:1].copy_):
            with pytest.raises(ValueError, match="kept"):
                write(torch.ones(1))
    assert kept.add_(1).tolist() == [1, 1]


def test_foreach_of():
    assert private.foreach_of(aten._foreach_zero_.default) is aten.zero_.default
    assert private.foreach_of(aten.zero_.default) is None


def test_trees():
    leaves, layout = private.tree_flatten(((1, [2]), {"a": 3}))
    assert leaves == [1, 2, 3]
    assert private.tree_unflatten(leaves, layout) == ((1, [2]), {"a": 3})


def test_without_base():
    linear = torch.nn.Linear(3, 3)
    view = linear(torch.ones(4, 3)).view(2, 2, 3)
    plain = private.without_base(view)
    assert view._base is not None
    assert plain._base is None
    assert plain.data_ptr() == view.data_ptr()
    plain.sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((3,), 4.0))
    assert private.without_base(plain) is plain


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def test_make_wrapper():
    like = torch.empty(4, 3, device="meta").t()
    wrapper = private.make_wrapper(Wrapper, like, torch.device("cpu"))
    assert isinstance(wrapper, Wrapper)
    assert (wrapper.shape, wrapper.stride(), wrapper.dtype) == (like.shape, like.stride(), torch.float32)
    assert private.make_wrapper(Wrapper, like, torch.device("cpu"), torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(wrapper)


class Doubling(Wrapper):
    """A shard whose all-gather hands out twice its values."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.values,), private.Offered()

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return None if out is not None else (gathered[0], ())


def look_at_fsdp(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    module = torch.nn.Linear(3, 5, bias=False)
    torch.nn.init.ones_(module.weight)
    assert private.fsdp_params(module) == []
    fully_shard(module, mesh=mesh)
    (record,) = private.fsdp_params(module)
    assert private.fsdp_groups(module) == [[record]]
    assert [group.fsdp_params for group in private.fsdp_param_groups(module)] == [[record]]
    shard = private.local_tensor(module.weight)
    assert record.sharded_param is module.weight
    assert shard.shape == (3 - rank, 3)
    assert tuple(record.padded_sharded_param_size) == (3, 3)
    half = private.sharded_like(shard.detach().bfloat16(), module.weight)
    assert isinstance(half, DTensor)
    assert (half.dtype, half.shape, half.placements) == (torch.bfloat16, (5, 3), module.weight.placements)
    assert private.local_tensor(half).dtype is torch.bfloat16, "the shard itself"
    doubling = private.make_wrapper(Doubling, shard, shard.device)
    doubling.values = torch.full((3, 3), 2.0)
    private.install_extension(record, doubling)
    assert private.local_tensor(module.weight) is doubling
    assert torch.equal(module(torch.ones(1, 3)), torch.full((1, 5), 6.0)), "the extension was not asked"
    assert private.local_tensor(record.sharded_param) is doubling, "FSDP2 put a plain shard in its place"
    look_at_meta(rank, mesh)
    dist.barrier()


def look_at_meta(rank, mesh):
    """A module sharded on meta computes with the shards it is given, wherever it uses them."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False, device="meta"), torch.nn.ReLU(), None)
    module[2] = torch.nn.Linear(3, 3, bias=False, device="meta")
    module[2].weight = module[0].weight
    fully_shard(module, mesh=mesh)
    (record,) = private.fsdp_params(module)
    padded = torch.full(record.padded_sharded_param_size, 2.0)
    private.give_shard(record, padded[: private.local_tensor(record.sharded_param).shape[0]], padded)
    assert module[0].weight is module[2].weight is record.sharded_param
    assert module[0].weight.device.type == "cpu"
    assert private.local_tensor(module[0].weight).shape == (2 - rank, 3)
    assert torch.equal(module(torch.ones(1, 3)), torch.full((1, 3), 36.0))


def look_at_two_ranks(rank, world_size):
    look_at_fsdp(rank, world_size)
    module = fully_shard(torch.nn.Linear(3, 5), mesh=init_device_mesh("cpu", (world_size,)))
    begins = private.shard_offsets(module.weight), private.shard_offsets(module.bias)
    store = private.store_of_all_ranks()
    store.set(f"word of {rank}", "hello")
    return begins, store.get(f"word of {1 - rank}")


@pytest.fixture(scope="module")
def two_ranks(once):
    """Two ranks look at what FSDP2 does with a shard that was given to it, and return what they found."""
    return once("torch private", lambda _: run_ranks(look_at_two_ranks, 2))


def test_shard_offsets(two_ranks):
    assert [begin for begin, _ in two_ranks] == [((0, 0), (0,)), ((3, 0), (3,))]


def test_what_the_metadata_of_a_stock_checkpoint_refers_to(tmp_path):
    """No more than the list and the path of the folder, and storage_info is what a stock reader looks for."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # there is no process group
        model = {"weight": torch.ones(2, 3), "n": torch.zeros((), dtype=torch.int8)}
        dcp.save({"model": model}, checkpoint_id=tmp_path)
    asked = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            asked.add((module, name))
            return super().find_class(module, name)

    with (tmp_path / ".metadata").open("rb") as file:
        metadata = Unpickler(file).load()
    assert asked - private.METADATA_GLOBALS == {(type(tmp_path).__module__, type(tmp_path).__name__)}
    assert {("torch", "float32"), ("torch", "int8"), ("torch", "Size")} <= asked & private.METADATA_GLOBALS
    for info in metadata.storage_data.values():
        assert private.storage_info(*private.storage_place(info)) == info


def test_one_rank_computes_on_its_shards(alone):
    """In the shard's dtype nothing is copied; where a cast is due it is the parameter that is. Gradients never are."""
    be_alone()
    for dtype, is_copied in ((None, False), (torch.bfloat16, True)):
        module, seen = torch.nn.Linear(3, 2, bias=False), []
        fully_shard(module, mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False))
        compute_on_shards(module)
        param, inputs = module.weight, torch.ones(1, 3, dtype=dtype)
        module.register_forward_hook(lambda module, *_, seen=seen: seen.append(module.weight))
        for factor in (1, 2):
            module(inputs).sum().mul(factor).backward()
            assert module.weight is param
            assert seen[-1] is seen[0]
            assert seen[0].grad is None
            assert (seen[0].untyped_storage().size() == 0) is is_copied, "what is gathered is freed, a shard is not"
            assert (seen[0].data_ptr() == private.local_tensor(param).data_ptr()) is not is_copied
        assert torch.equal(param.grad.full_tensor(), torch.full((2, 3), 3.0))
        with torch.no_grad():
            private.local_tensor(param).fill_(0.5)
        param.grad = None
        module.set_requires_gradient_sync(False)
        output = module(inputs)
        assert torch.equal(output.float(), torch.full((1, 2), 1.5)), "the value that it has now"
        output.sum().backward()
        assert param.grad is None
        module.set_requires_gradient_sync(True)
        module(inputs).sum().backward()
        assert torch.equal(param.grad.full_tensor(), torch.full((2, 3), 2.0))


def test_a_forward_is_counted_until_its_backward_comes(alone):
    be_alone()
    used_twice = torch.nn.Linear(3, 3, bias=False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), used_twice, torch.nn.Tanh(), used_twice)
    for module in (used_twice, model):
        fully_shard(module)
    left = []
    note = partial(private.num_backwards_left, used_twice)
    used_twice.weight.register_post_accumulate_grad_hook(lambda param: left.append(note()))
    output = model(torch.ones(1, 3))
    assert private.num_backwards_left(used_twice) == 2
    output.sum().backward()
    assert left[-1] == 0, "when the gradient is whole"


class CalledTwice(torch.nn.Linear):
    """A root module, whose one block is called twice."""

    def __init__(self):
        super().__init__(2, 2)
        self.block = torch.nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return super().forward(x) + sum(checkpointing.checkpoint(self.block, x, use_reentrant=True) for _ in range(2))


def test_reduce_every_call(alone):
    """FSDP2 alone gives the gradient of one call: where it gives both this is needed no longer."""
    be_alone()
    grads = []
    for hook in (lambda model: None, private.reduce_every_call):
        model = CalledTwice()
        for module in (model.block, model):
            fully_shard(module)
        hook(model)
        shard = model.block.weight
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        grads.append(shard.grad.full_tensor()[0, 0].item())
    assert grads == [1.0, 2.0]


def _is_sharded(shard, value):
    return private.is_dtensor(value)


def test_guard_shards_and_take_the_place_of(alone):
    be_alone()
    layer = torch.nn.Linear(2, 2, bias=False)
    old = layer.weight
    old.is_mine = True
    handle = old.register_hook(lambda grad: 3 * grad)
    put_on = private.PutOn.of(old)
    fully_shard(layer)
    [record] = private.fsdp_params(layer)
    shard = layer.weight
    assert not private.has_accumulation_hooks(old)
    private.take_the_place_of(old, put_on, record, Mock(side_effect=TypeError("gone")))
    assert private.has_accumulation_hooks(old)
    private.guard_shards(lambda tensor: record if tensor is shard else None, _is_sharded, "it is a shard")
    with pytest.raises(ValueError, match="it is a shard"):
        shard.data = torch.ones(2, 2)
    shard.data *= 1
    assert shard.is_mine
    assert shard.data is not shard
    shard.register_hook(lambda grad: grad + 1)
    for expected in (4.0, 6.0):
        layer(torch.ones(1, 2)).sum().backward()
        assert shard.grad.full_tensor()[0, 0] == expected
        handle.remove()
    with pytest.raises(TypeError, match="gone"):
        old.sum().backward()
    layer.unshard()
    assert layer.weight is not shard
    assert [*map(id, private.shards_of(layer.parameters()))] == [id(shard)]


def test_hook_outputs(alone):
    """Each tensor is hooked once, whoever finds it; modules that are gathered together have one state."""
    be_alone()
    modules = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    known, hidden = (torch.zeros(1, requires_grad=True) * 1 for _ in range(2))
    fully_shard(modules, mesh=init_device_mesh("cpu", (1,)))
    for module in modules:
        hook_outputs(module, lambda output: [*output, hidden])
    modules[0]._get_fsdp_state()._register_pre_backward_hook([known])
    assert len(known._backward_hooks) == len(hidden._backward_hooks) == 1


def test_local_tensor_of_a_plain_tensor_is_itself():
    tensor = torch.ones(2)
    assert private.local_tensor(tensor) is tensor
    assert not private.is_dtensor(tensor)
    assert not private.is_wrapper(tensor)
    assert not private.is_fsdp(torch.nn.Linear(1, 1))


def test_store_of_all_ranks(two_ranks):
    assert [word for _, word in two_ranks] == [b"hello", b"hello"]


def test_not_compiled():
    graphs = []

    @private.not_compiled
    def add(tensor):
        return tensor + 1

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    assert torch.compile(lambda: add(torch.ones(2)), backend=backend)().tolist() == [2, 2]
    assert len(graphs) <= 1, "of what is around it"
    assert not any("add" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_refuse_conversion():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    private.refuse_conversion(module, "is not converted")
    weight = module[0].weight
    assert module.to("cpu").float() is module
    with pytest.raises(ValueError, match=r"0\.weight is not converted"):
        module.to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"0\.weight is not converted"):
        module.double()
    assert module[0].weight is weight


def test_refuse_ddp(alone):
    be_alone()
    module = torch.nn.Linear(2, 2)
    private.refuse_ddp(module, "not here")
    with pytest.raises(TypeError, match="not here"):
        torch.nn.parallel.DistributedDataParallel(module)


def test_running_last_before_load():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    ran = []
    ours, theirs = (lambda *_, name=name: ran.append(name) for name in ("ours", "theirs"))
    optimizer.register_load_state_dict_pre_hook(ours)  # left behind by a load that was cut short
    optimizer.register_load_state_dict_pre_hook(theirs)
    with private.running_last_before_load(optimizer, ours):
        optimizer.load_state_dict(optimizer.state_dict())
    assert ran == ["theirs", "ours"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert ran == ["theirs", "ours", "theirs"]


def test_state_dict_hooks():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    before, after = print, repr
    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_state_dict_post_hook(after)
    assert private.state_dict_hooks(optimizer) == ([before], [after])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_has_context():
    torch.cuda.synchronize()
    assert private.has_context(torch.device("cuda", torch.cuda.current_device()))


def test_every_function_is_named_here():
    own = {name for name, value in vars(private).items() if getattr(value, "__module__", "") == private.__name__}
    named = set(re.findall(r"\bprivate\.(\w+)", Path(__file__).read_text(encoding="utf-8")))
    assert {name for name in own - {"P", "R"} if not name.startswith("_")} <= named


def test_fsdp2_has_every_name_that_its_passes_are_changed_by():
    """A device has some of them alone, and no test without one would miss them."""
    changed = ast.walk(ast.parse(Path(_fsdp_passes.__file__).read_text(encoding="utf-8")))
    used = {node.attr for node in changed if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"}
    sources = [path.read_text(encoding="utf-8") for path in Path(_fully_shard.__file__).parent.glob("*.py")]
    words = set(re.findall(r"\w+", "".join(sources)))
    assert used - words - {*dir(torch), *dir(torch.Tensor)} <= {"manual_backward_finalization_active"}  # 2.15 has it


def test_without_torch_function():
    """A class that takes operators over is not asked, in this thread."""

    class Mute(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return None

    tensor = torch.ones(2).as_subclass(Mute)
    assert tensor.sum() is None
    with private.without_torch_function():
        assert tensor.sum() == 2


def test_fake_tensors_and_watching():
    """Autocast casts tensors without data as others, and each operator is seen with what it gives."""
    seen = []
    with private.fake_tensors(), torch.autocast("cpu", torch.bfloat16):
        left, right = torch.empty(1 << 20, 1 << 20), torch.empty(1 << 20, 1)
        with private.watching(lambda op, leaves, kwargs, result: seen.append((op, leaves, kwargs, result))):
            product = left @ right
    assert (product.shape, product.dtype, product.device.type) == ((1 << 20, 1), torch.bfloat16, "cpu")
    found = [(private.is_cast(op), op is aten.mm.default) for op, *_ in seen]
    assert found == [(True, False), (True, False), (False, True)]
    assert {id(seen[0][1][0]), id(seen[1][1][0])} == {id(left), id(right)}, "in either order"
    assert seen[0][2]["dtype"] is torch.bfloat16
    assert seen[-1][3] is product


def test_storage_identity():
    tensor = torch.ones(3)
    identity, view = private.storage_identity(tensor.untyped_storage()), tensor[1:]
    assert identity == private.storage_identity(view.untyped_storage())
    assert hash(identity) == hash(private.storage_identity(view.untyped_storage()))
    del tensor, view
    assert all(private.storage_identity(torch.ones(3).untyped_storage()) != identity for _ in range(100)), "it is held"


def test_top_saved_tensor_hooks():
    assert private.top_saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(abs, repr):
        assert private.top_saved_tensor_hooks() == (abs, repr)
        seen = []
        torch.utils.checkpoint.checkpoint(
            lambda x: seen.append(private.top_saved_tensor_hooks()) or x * x,
            torch.ones(2).requires_grad_(),
            use_reentrant=False,
        )
        assert seen[0] not in (None, (abs, repr))


def test_keeping_selected():
    """Selective checkpointing has no names of its own beside this one, and without a keeper it is torch's."""
    kept = []

    def train(x):
        keep = partial(checkpointing.create_selective_checkpoint_contexts, [torch.ops.aten.exp.default])
        y = checkpointing.checkpoint(lambda x: x.exp().sin().exp(), x, use_reentrant=False, context_fn=keep)
        return torch.autograd.grad(y.sum(), x)[0]

    x = torch.ones(3, requires_grad=True)
    expected = train(x)
    with private.keeping_selected(lambda tensor: kept.append(tensor) or Mock(take=lambda: tensor, counter=tensor)):
        assert torch.equal(train(x), expected)
        with private.keeping_selected(lambda tensor: None):
            assert torch.equal(train(x), expected)
    assert [tuple(tensor.shape) for tensor in kept] == [(3,), (3,)]
    assert torch.equal(train(x), expected)
    assert len(kept) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_replace_calls(compiled):
    module, calls = torch.nn.Linear(2, 2), []
    if compiled:
        module.compile(backend="eager")
    module.register_forward_pre_hook(lambda *_: calls.append("hook"))

    def call(inner, args, kwargs):
        calls.append("ours")
        return inner(*args, **kwargs)

    undo = private.replace_calls([module], call)
    assert private.is_compiled(module) is compiled
    x = torch.ones(2)
    expected = x @ module.weight.T + module.bias
    assert torch.equal(module(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(module.weight)), module.weight)
    undo()
    assert torch.equal(module(x), expected)
    assert calls == ["ours", "hook", "hook"]


def test_attention_and_its_arguments():
    ran = []

    def run(op, args, kwargs):
        ran.append((op, private.argument_of(op, "dropout_p", args, kwargs, 0.0)))
        return op(*args, **kwargs)

    begun = []
    with private.run_operators(run, lambda: begun.append(True)):
        query = torch.ones(1, 1, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert begun == [True]
    assert [dropout for op, dropout in ran if op in private.ATTENTION] == [0.0]
    [op] = [op for op, _ in ran if op in private.ATTENTION]
    assert private.argument_of(op, "dropout_p", (query, query, query, 0.25), {}, 0.0) == 0.25
    assert private.argument_of(op, "dropout_p", (query, query, query), {"dropout_p": 0.5}, 0.0) == 0.5


def test_gathered_params(alone):
    be_alone()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    seen = []
    shapes = lambda *_: seen.append([p.shape for p in private.gathered_params(model)])  # noqa: E731
    model[0].register_forward_hook(shapes, prepend=True)
    model(torch.ones(1, 2))
    assert torch.Size([3, 2]) in seen[0]
    model[0].reshard()
    model[1].reshard()
    assert list(private.gathered_params([model[0], model[1]])) == []

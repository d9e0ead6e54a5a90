"""Where a model is trained, and what of FSDP2's own offloading goes with it."""

import json
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from nvme_offload import (
    OffloadAdamW,
    TensorSwapper,
    get_full_optimizer_state,
    get_full_param,
    initialize,
    set_full_optimizer_state,
    split_parameters,
)
from nvme_offload.offload.devices.device import CopyQueue
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.optim.ranks.collective import device_of, on_every_rank
from nvme_offload.optim.state.worker import Worker
from nvme_offload.optim.step.norm import _gather
from nvme_offload.optim.tiers.arrivals import Arrivals
from nvme_offload.optim.zero.meshes import default_mesh
from tests.support.late_device.module import install, late_device
from tests.support.late_device.mutations import OF_ENDS, OF_THREADS
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_bits

CONFIG = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}

pytestmark = pytest.mark.usefixtures("alone")


def model_on(device):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


def test_shards_that_fsdp2_offloads_itself_are_refused_before_anything_is_changed():
    mesh, model = default_mesh("cpu"), model_on("cpu")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match=r"CPUOffloadPolicy.*call fully_shard without offload_policy"):
        split_parameters(model)
    assert all(type(parameter.to_local()) is torch.Tensor for parameter in model.parameters())


def test_a_model_on_meta_goes_to_the_device_that_torch_sees(late):
    with initialize(model_on("meta"), CONFIG) as engine:
        assert {parameter.device.type for parameter in engine.module.parameters()} == {"late"}
        assert engine.mesh.device_type == "late"
        values = [parameter.full_tensor().cpu() for parameter in engine.module.parameters()]
    assert all(value.isfinite().all() for value in values)


def test_a_model_on_meta_stays_on_the_cpu_of_a_host_without_devices():
    with initialize(model_on("meta"), CONFIG) as engine:
        assert engine.mesh.device_type == "cpu"


def _looked_at(rank, world_size):
    """Values of a model on a device, over groups that can gather there alone, as with NCCL."""
    install()
    mesh = DeviceMesh.from_group(dist.new_group(range(world_size), backend="late:gloo"), "late", mesh_dim_names=("dp",))
    assert device_of(mesh.get_group()).type == "late"
    torch.manual_seed(0)
    with late_device(), initialize(model_on("cpu").to("late"), CONFIG, mesh=mesh) as engine:
        weight = next(iter(engine.module.parameters()))
        set_full_optimizer_state(weight, "exp_avg", torch.arange(256.0).view(16, 16))
        with pytest.raises(ZeroDivisionError):
            on_every_rank(lambda: 1 / rank, mesh.get_group())
        found = [
            get_full_param(weight),
            get_full_optimizer_state(weight, "exp_avg"),
            engine.optimizer.state[weight]["exp_avg"].full_tensor().cpu(),
            _gather(float(rank), mesh.get_group()),
        ]
        engine.backward(engine(torch.ones(2, 16, device="late")).sum())  # ranks agree on what they reduce on the CPU
        engine.step()
        return found


def test_a_model_is_trained_and_looked_at_over_groups_without_a_backend_for_the_cpu():
    torch.manual_seed(0)
    [weight, *_] = model_on("cpu").parameters()
    for found in run_ranks(_looked_at, 2):
        moment = torch.arange(256.0).view(16, 16)
        assert_same_bits(found, [weight.detach(), moment, moment, torch.tensor([0.0, 1.0], dtype=torch.float64)])


def test_a_model_on_another_device_than_the_current_one_is_refused(late):
    with pytest.raises(ValueError, match=r"on late:1, and this process computes on late:0: .*set_device\(1\)"):
        initialize(model_on("cpu").to("late:1"), CONFIG)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({}, "lower zero_optimization.sub_group_size"),
        ({"offload_param": {"device": "cpu"}}, 'write "nvme" for zero_optimization.offload_param.device'),
        ({"offload_param": {"device": "nvme", "nvme_path": "DRIVE"}}, "lower zero_optimization.offload_param.buffer_"),
    ],
)
def test_memory_that_cannot_be_page_locked_is_used_as_it_is_or_names_its_key(late, tmp_path, more, key):
    config = json.loads(json.dumps(CONFIG))
    config["zero_optimization"] |= json.loads(json.dumps(more).replace("DRIVE", str(tmp_path)))
    config["offload_gradients"] = {"device": "cpu" if more else "none"}

    def place():
        late.refusals = 1000
        with initialize(model_on("cpu").to("late"), config) as engine:
            engine.optimizer.place()
            return engine.optimizer.store.mirror.size_bytes

    with pytest.warns(RuntimeWarning, match=key) as said:
        place()
    assert len(said) == 1
    assert not late.pinned
    dist.destroy_process_group()
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    with pytest.raises(RuntimeError, match=rf"cudaHostRegister refused .*{key}.* or set .*pin_memory to false"):
        place()
    assert not late.pinned


class Copying:
    """A job that copies once."""

    must_end = False
    is_done = False

    def shift(self):
        CopyQueue(torch.device("late", 1)).carry(torch.empty(8), torch.ones(8, device="late:1"))
        self.is_done = True
        return False

    def give_up(self, error):
        raise AssertionError from error


def take_a_turn():
    worker = Worker(device=lambda: torch.device("late", 1))
    worker.job = Copying()
    worker.wait_until(lambda: worker.is_idle)
    worker.raise_failure()
    worker.stop()


def let_gradients_land():
    arrivals = Arrivals(torch.device("late", 1), PageLocks(asked=True))
    for _ in range(3):
        arrivals.bring(None, torch.ones(8, device="late:1"), lambda landed: landed.neg_())
    arrivals.land()
    arrivals.close()


def test_a_gradient_that_memory_was_refused_for_is_not_taken_for_landed(late):
    arrivals, landed = Arrivals(torch.device("late"), PageLocks(asked=True)), []
    grads = torch.ones(8, device="late"), torch.full((8,), 2.0, device="late")
    late.requests_left = 1
    with pytest.raises(torch.OutOfMemoryError):
        arrivals.bring(None, grads[0], lambda there: landed.append(float(there.sum())))
    arrivals.bring(None, grads[1], lambda there: landed.append(float(there.sum())))
    arrivals.land()
    assert landed == [16.0]
    arrivals.close()


def swap():
    with tempfile.TemporaryDirectory() as drive:
        section = {"offload_optimizer": {"device": "nvme", "nvme_path": drive}}
        with TensorSwapper({"zero_optimization": section}) as swapper:
            swapper.swap_out("ones", torch.ones(8, device="late:1"))
            assert swapper.swap_in("ones").wait(60).device == torch.device("late", 1)


@pytest.mark.parametrize("work", [take_a_turn, let_gradients_land, swap])
def test_a_thread_that_works_for_a_device_opens_no_context_on_another(late, work):
    torch.late.set_device(1)
    work()
    assert late.contexts == {1}


def end_with_blocks_on_their_way():
    """They are copied to the device in a forward, and nobody has waited for that."""
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "offload_param": {"device": "cpu"}}}
    with initialize(model_on("cpu").to("late"), {**config, "offload_gradients": {"device": "cpu"}}) as engine:
        engine.optimizer.place()
        with torch.no_grad():
            engine(torch.ones(2, 16, device="late"))


def end_with_gradients_on_their_way():
    arrivals = Arrivals(torch.device("late"), PageLocks(asked=True))
    arrivals.bring(None, torch.ones(8, device="late"), lambda landed: landed.neg_())
    arrivals.close()


def end_behind_a_step():
    param = torch.nn.Parameter(torch.ones(8, device="late"))
    param.grad = torch.ones(8, device="late")
    with OffloadAdamW([param], offload={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}) as optimizer:
        optimizer.step()


def fail_halfway():
    """The second copy cannot be queued, and whoever asked for both lets the memory go."""
    region = HostRegion(4096)
    region.pin(torch.device("late"))
    target, source = region.view(torch.float32, 0, 8), torch.ones(8, device="late")
    with pytest.raises(AssertionError):
        CopyQueue(torch.device("late")).copy_all([(target, source), (target.half(), source)])
    region.unpin()


def copy_to_what_is_dropped():
    region, queue = HostRegion(4096), CopyQueue(torch.device("late"))
    region.pin(torch.device("late"))
    queue.copy_all([(torch.empty(8, device="late"), region.view(torch.float32, 0, 8))])
    torch.empty(8, device="late")  # which may get the same memory
    torch.late.synchronize()
    region.unpin()


ENDS = [
    end_with_blocks_on_their_way,
    end_with_gradients_on_their_way,
    end_behind_a_step,
    fail_halfway,
    copy_to_what_is_dropped,
]


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_has_no_copy_under_way(late, end):
    end()
    assert (late.unlocked_early, late.freed_early) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("end", "mistake"), list(zip(ENDS, OF_ENDS, strict=True)))
def test_what_ends_with_a_copy_under_way_is_found(late, end, mistake):
    with OF_ENDS[mistake]():
        end()
    assert late.unlocked_early + late.freed_early > 0
    late.unlocked_early = late.freed_early = 0


@pytest.mark.slow
@pytest.mark.parametrize("mistake", OF_THREADS)
def test_a_context_on_another_device_is_found(late, mistake):
    torch.late.set_device(1)
    with OF_THREADS[mistake]():
        take_a_turn()
        torch.late.set_device(0)
        region = HostRegion(4096)
        region.pin(torch.device("late", 1))
        region.unpin()
    assert late.contexts != {1} or late.pinned_on != [1]


def _tried_in_a_captured_graph(rank, world_size):
    """Weights on the stand-in and on the CPU; whoever reads parameters behind a step comes to waits for copies, too."""
    os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")  # each engine makes a group of its own device
    trained = []
    with late_device() as late:

        def refused(call):
            late.is_capturing = True
            with pytest.raises(RuntimeError, match="captures a CUDA graph"):
                call()
            late.is_capturing = False

        for device, tried in (("late", refused), ("cpu", lambda call: None)):
            dist.destroy_process_group()
            torch.manual_seed(0)
            x = torch.ones(2, 16).to(device)
            with initialize(model_on("cpu").to(device), {**CONFIG, "overlap_step": "forward"}) as engine:
                weight = next(iter(engine.module.parameters()))
                for _ in range(2):
                    tried(lambda: engine(x))  # noqa: B023
                    loss = engine(x).float().square().mean()
                    tried(lambda: engine.backward(loss))  # noqa: B023
                    engine.backward(loss)
                    tried(engine.step)
                    engine.step()
                    tried(lambda: get_full_param(weight))  # noqa: B023
                trained.append([get_full_param(parameter) for parameter in engine.module.parameters()])
    return trained


def test_a_graph_that_is_captured_holds_no_call_of_ours_and_trying_costs_nothing():
    """In a process of its own: autograd knows only devices that are there at its first backward."""
    [trained] = run_ranks(_tried_in_a_captured_graph, 1)
    assert_same_bits(*trained)


def test_ranks_with_a_device_can_gather_in_host_memory_too(late):
    """State of parameters on a device is there: a group of NCCL alone could not gather it."""
    default_mesh("late")
    assert dist.get_backend_config() == "cpu:gloo,late:gloo"


needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _on_a_card(rank, world_size, backend, capturing):
    """Weights after three steps over groups of a backend; between two calls a graph of other work is captured."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(backend, init_method=f"file://{store.name}_", rank=rank, world_size=world_size)
        mesh = dist.device_mesh.init_device_mesh("cuda", (world_size,))
        torch.manual_seed(0)
        config = {**CONFIG, "overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False}
        with initialize(model_on("cpu").cuda(), config, mesh=mesh) as engine:
            x, own = torch.ones(2, 16, device="cuda"), torch.zeros(4, device="cuda")
            for step in range(3):
                loss = engine(x).float().square().mean()
                if capturing:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                        own += 1
                    graph.replay()
                    assert own.sum().item() == 4 * (step + 1)
                engine.backward(loss)
                engine.step()
            return [get_full_param(parameter).cpu() for parameter in engine.module.parameters()]


@pytest.mark.parametrize(
    ("backend", "capturing"),
    [pytest.param("nccl", False, marks=needs_cuda), pytest.param("cpu:gloo,cuda:nccl", True, marks=needs_cuda)],
)
def test_on_a_card_neither_nccl_alone_nor_a_graph_beside_it_changes_a_bit(backend, capturing):
    [expected] = run_ranks(_on_a_card, 1, "cpu:gloo,cuda:nccl", False)
    [found] = run_ranks(_on_a_card, 1, backend, capturing)
    assert_same_bits(found, expected)

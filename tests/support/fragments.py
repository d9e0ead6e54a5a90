"""What a reader has before each block of a page that is shown without its beginning, and what is cleaned up after it.

A function of a page yields before each of its blocks the names that the block takes for granted; the names that the
block makes are in `names` when it goes on.
"""

import copy
import itertools
import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from nvme_offload import OffloadAdamW, initialize, split_parameters
from nvme_offload.perf import cli

ROOT = Path(__file__).parents[2]


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def write_section(drive, **more):
    """The file `offload.json` that pages speak of."""
    section = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(drive)}}, **more}
    Path("offload.json").write_text(json.dumps(section), encoding="utf-8")
    return section


def trainers(names):
    """What somebody has who trains with `Trainer`."""
    transformers = import_module("transformers")
    llama = import_module("tests.support.small_llama")
    how = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none"}
    settings = transformers.TrainingArguments(output_dir="trained", **how)
    found = {"settings": settings, "data": llama.rows(), "Trainer": transformers.Trainer, "torch": torch}
    return found | {"model": llama.llama().bfloat16(), "OffloadAdamW": OffloadAdamW}


def configuration(names, drive):
    write_section(drive)
    yield {}
    Path("ds_config.json").write_text('{"gradient_clipping": "auto"}', encoding="utf-8")
    yield {"args": trainers(names)["settings"]}
    assert names["config"].gradient_clipping == 1.0


def durable(names, drive):
    section = write_section(drive, bf16={"enabled": True})
    batches = torch.randn(3, 4, 8)

    def loss_of(engine, batch):
        return engine(batch).float().square().mean()

    yield {"section": section, "model": small(), "batches": batches, "loss_of": loss_of}
    assert names["engine"].global_steps == 3
    names["engine"].close()
    dist.destroy_process_group()
    section["zero_optimization"]["offload_optimizer"]["durable"] = "on-rows"
    engine = initialize(small(), section)
    loader = torch.utils.data.DataLoader
    yield {"torch": torch, "DataLoader": loader, "rows": batches.flatten(0, 1), "batch_size": 4, "num_epochs": 2} | {
        "engine": engine,
        "loss": lambda out: out.float().square().mean(),
    }
    assert engine.global_steps == 6
    engine.close()
    dist.destroy_process_group()
    for name in ("my-run", "on-rows"):
        removed = CliRunner().invoke(cli.app, ["runs", "remove", name, str(drive)])
        assert removed.exit_code == 0, removed.output


def hazards(names, drive):
    model = small().bfloat16()
    optimizer = OffloadAdamW(model.parameters(), offload=write_section(drive))
    model(torch.randn(4, 8).bfloat16()).square().mean().backward()
    yield {"optimizer": optimizer}
    assert optimizer.stats().steps == 1
    optimizer.close()


def sharding(names, drive):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    write_section(drive)
    fsdp = import_module("torch.distributed.fsdp")
    known = {"MixedPrecisionPolicy": fsdp.MixedPrecisionPolicy, "fully_shard": fsdp.fully_shard, "torch": torch}
    known |= {"split_parameters": split_parameters, "OffloadAdamW": OffloadAdamW, "batch": torch.randn(4, 8)}

    def build():
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        model.blocks = [*model]
        return model

    yield known | {"build": build, "loss": lambda output: output.float().square().mean()}
    assert names["optimizer"].stats().steps == 1
    names["optimizer"].close()
    dist.destroy_process_group()


def hugging_face(names, drive):
    transformers = import_module("transformers")
    llama = import_module("tests.support.small_llama")
    llama.llama().save_pretrained("llama")
    write_section(drive, bf16={"enabled": True})
    ids = torch.arange(16)[None]
    known = {"LlamaForCausalLM": transformers.LlamaForCausalLM, "name": "llama", "initialize": initialize}
    yield known | {"batches": [{"input_ids": ids, "labels": ids}], "dist": dist}
    write_section(drive)
    yield trainers(names)
    Path("ds_config.json").write_text(Path("offload.json").read_text("utf-8"), encoding="utf-8")
    yield trainers(names)
    yield trainers(names)
    names["engine"] = initialize(llama.llama(), write_section(drive, bf16={"enabled": True}))
    accelerator, loader = import_module("accelerate").Accelerator(cpu=True), torch.utils.data.DataLoader(llama.rows(4))
    yield {"accelerator": accelerator, "loader": loader, "itertools": itertools}
    assert names["losses"]
    yield {"folder": "saved"}
    names["engine"].close()
    write_section(drive)
    accelerated = import_module("tests.support.accelerated")
    os.environ.update(RANK="0", WORLD_SIZE="1")
    with accelerated.sharding_on_cpu():
        accelerate = import_module("accelerate")
        known = {"Accelerator": accelerate.Accelerator, "split_parameters": split_parameters}
        known["FullyShardedDataParallelPlugin"] = accelerate.FullyShardedDataParallelPlugin
        yield known | {"model": small(), "batches": torch.utils.data.DataLoader(torch.randn(4, 8))}
        names["optimizer"].optimizer.close()
    dist.destroy_process_group()
    yield {}


class Metric:
    """A metric of Prometheus's client, which is not installed here."""

    def __init__(self, name, documentation, labelnames):
        self.value, self.labelnames = 0.0, set(labelnames)

    def labels(self, **labels):
        assert labels.keys() == self.labelnames
        return self

    def set(self, value):
        self.value = value

    def inc(self, amount):
        assert amount >= 0, "of a real counter a ValueError"
        self.value += amount


def watching(names, drive):
    kinds = {name: type(name, (Metric,), {}) for name in ("Counter", "Gauge")}
    sys.modules["prometheus_client"] = SimpleNamespace(**kinds, start_http_server=lambda port: None)
    param = torch.nn.Parameter(torch.zeros(8))
    with OffloadAdamW([param], offload=str(drive)) as optimizer:
        yield {"optimizer": optimizer}
        del sys.modules["prometheus_client"]
        for _ in range(3):
            param.grad = torch.ones(8)
            optimizer.step()
            names["publish"]()
        found = {name: metric.value for name, metric in names["metrics"].items()}
    assert found["steps"] == 3
    assert type(names["metrics"]["steps"]) is kinds["Counter"]
    assert type(names["metrics"]["state_bytes"]) is kinds["Gauge"]


@dataclass
class SparseWeightPatch:
    """Has the fields of vLLM's, in their order, and is refused where its engine refuses one (`_validate_patch`)."""

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple[int, ...]

    def __post_init__(self):
        assert (self.indices.dtype, self.indices.ndim, self.values.ndim) == (torch.int32, 1, 1)
        assert self.indices.numel() == self.values.numel()


class SparseServer:
    """The model of an inference server, behind what vLLM's sparse trainer engine and TRL's client offer."""

    def __init__(self, model):
        self.model, self.calls = model, []

    def send_weights(self, patches=None):
        weights = self.model.state_dict()
        for each in patches:
            assert weights[each.name].shape == each.full_shape
            weights[each.name].view(-1)[each.indices.long()] = each.values
        self.calls.append("send")

    def pause(self, timeout=1800):
        self.calls.append("pause")

    def resume(self, timeout=1800):
        self.calls.append("resume")

    def shutdown(self):
        self.calls.append("shutdown")


def weights(names, drive):
    model = small().bfloat16()
    server = SparseServer(copy.deepcopy(model))
    engines = ModuleType("vllm.distributed.weight_transfer.sparse_nccl_engine")
    engines.SparseWeightPatch = SparseWeightPatch
    with patch.dict(sys.modules, {engines.__name__: engines}):
        yield {}
    with OffloadAdamW(model.parameters(), lr=1e-4, offload=write_section(drive)) as optimizer:
        transfer = names["PatchTransfer"](model, optimizer, server, lambda: server, "cpu")
        transfer.init_weight_transfer()
        for _ in range(2):
            model(torch.randn(4, 8).bfloat16()).square().mean().backward()
            optimizer.step()
            transfer.pause()
            transfer.send_weights(iter(()))
            transfer.resume()
            ours, theirs = model.state_dict(), server.model.state_dict()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        transfer.destroy()
    assert server.calls == ["pause", "send", "resume"] * 2 + ["shutdown"]


def readme(names, drive):
    yield {}
    section = write_section(drive, bf16={"enabled": True})
    section["zero_optimization"]["offload_optimizer"]["durable"] = "my-run"
    for batches in (2, 5):  # the second time goes on from the first
        with initialize(small(), section) as engine:
            names["train"](engine, torch.randn(batches, 4, 8), lambda model, rows: model(rows).sum())
            assert (engine.global_steps, engine.client_state) == (batches, {"position": batches})
        dist.destroy_process_group()
    removed = CliRunner().invoke(cli.app, ["runs", "remove", "my-run", str(drive)])
    assert removed.exit_code == 0, removed.output


PAGES = {
    "README.md": readme, "docs/configuration.md": configuration, "docs/durable.md": durable, "docs/hazards.md": hazards,
    "docs/hugging_face.md": hugging_face, "docs/sharding.md": sharding, "docs/watching.md": watching,
    "docs/weights.md": weights,
}  # fmt: skip
ELSEWHERE = {
    "docs/hosts.md": "tests/test_hosts.py",
    "docs/lightning.md": "tests/clients/test_lightning.py",
    "docs/parallelism.md": "tests/optim/zero/test_pipeline.py",
    "docs/torchtitan.md": "tests/clients/test_torchtitan.py",
}
"""Pages whose blocks need more ranks or packages; the tests that do what they show."""

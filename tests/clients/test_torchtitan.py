"""torchtitan: its container of optimizers, with its parameter groups and its state dicts."""

import pytest
import torch
from torch import nn

from nvme_offload import OffloadAdamW
from tests.support.clients import WITH_A_LINE, client
from tests.support.training import section

optimizers = pytest.importorskip("torchtitan.components.optimizer.optimizer", reason="make clients installs it")

LINE = "a subclass of `OptimizersContainer` that knows the name"


class Container(optimizers.OptimizersContainer):
    @staticmethod
    def _resolve_optimizer_factory(name):
        known = optimizers.OptimizersContainer._resolve_optimizer_factory
        return OffloadAdamW if name == "OffloadAdamW" else known(name)


def run(name, arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    groups = [
        optimizers.ParamGroupConfig(
            pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-2, "weight_decay": decay}
        )
        for pattern, decay in ((r"bias$", 0.0), (r".*", 0.1))
    ]
    config = Container.Config(
        param_groups=groups, implementation="for-loop", optimizer_factory_kwargs_by_name={name: arguments}
    )
    container = Container(config, model_parts=[model])
    torch.manual_seed(1)
    losses = []
    for step in range(6):
        container.zero_grad()
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        container.step()
        losses.append(loss.item())
        if step == 3:
            container.load_state_dict(container.state_dict())
    return losses, set(container.state_dict()), container


@client("torchtitan", "`OptimizersContainer`, parameter groups, state dicts", WITH_A_LINE, LINE)
def test_the_container_has_torch_adamws_losses(tmp_path):
    expected, names, _ = run("AdamW", {})
    losses, found, container = run("OffloadAdamW", {"offload": section(tmp_path)})
    assert losses == pytest.approx(expected, abs=1e-6, rel=0)
    assert {name for name in names if name.startswith("state.")} <= found
    for optimizer in container.optimizers:
        optimizer.close()

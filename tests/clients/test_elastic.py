"""torchrun starts the ranks again when one has died: a durable run goes on, to the weights of torch's AdamW."""

import os
import sys
import textwrap

import pytest
import torch
from torch import nn

from tests.support.clients import SETTINGS, UNCHANGED, client
from tests.support.forked import ROOT, output_of

STEPS, DIES_AFTER = 6, 3
SCRIPT = """
    import os, signal, sys
    import torch, torch.distributed as dist
    from nvme_offload import initialize
    from tests.clients.test_elastic import DIES_AFTER, SETTINGS, STEPS, batch, model

    folder = sys.argv[1]
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    offload = {"device": "nvme", "nvme_path": folder, "durable": "run"}
    section = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "gradient_clipping": 0.5}
    with initialize(model(), section | {"optimizer": {"type": "AdamW", "params": SETTINGS}}) as engine:
        begin, _ = engine.resume() or (0, None)
        for step in range(begin, STEPS):
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()
            if (rank, life, step) == (1, 0, DIES_AFTER):
                os.kill(os.getpid(), signal.SIGKILL)
        assert engine.optimizer.stats().updates_behind > 0
        params = {name: param.full_tensor() for name, param in engine.module.named_parameters()}
        if rank == 0:
            torch.save([life, begin, params], folder + "/end")
"""


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


def batch(step, rank):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))


@pytest.mark.slow
@client(
    "torch",
    "`torchrun --max-restarts` around `engine.resume()`: ranks that are killed go on",
    UNCHANGED,
    "with gloo, torch 2.13 wants `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`",
)
def test_ranks_that_are_started_again_go_on(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo looks for the ranks of the first life
    output_of(*command, tmp_path / "train.py", tmp_path, env=environment, timeout=200)
    life, begin, found = torch.load(tmp_path / "end")
    assert life == 1
    assert 0 < begin <= DIES_AFTER + 1
    expected = model()
    optimizer = torch.optim.AdamW(expected.parameters(), **SETTINGS)
    for step in range(STEPS):
        expected(torch.cat([batch(step, rank) for rank in range(2)])).square().mean().backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found, dict(expected.named_parameters()), rtol=0, atol=1e-5)

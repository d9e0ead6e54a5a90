"""Small models whose saved tensors are worth moving, and their gradients with and without that."""

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvme_offload import ActivationSwapper
from tests.support.training import assert_same_bits

WIDTH, ROWS = 64, 100  # a saved tensor of a layer has 25,600 bytes, and no parameter has its shape
KEEPS = ["all", "attention", "boundaries"]
KiB = 1 << 10


def section(path, keep="all", **more):
    """All but four or five of a model's saved tensors on NVMe; on no drive where there is no `path`."""
    place = {"device": "nvme", "nvme_path": str(path)} if path else {"device": "cpu"}
    aio = more.pop("aio", {})
    given = {"keep": keep, "host_budget": 128 * KiB, "min_bytes": 4 * KiB, **place, **more}
    return {"activations": given, "aio": aio}


class Layers(nn.Module):
    """Layers beside a stream: what each saves is the stream, and what it makes of it."""

    def __init__(self, depth=8, *, dropout=0.0, inplace=False, checkpointed=None, layer=None):
        super().__init__()
        self.layers = nn.ModuleList((layer or Layer)(dropout, inplace) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed is None:
                x = layer(x)
            elif callable(self.checkpointed):
                x = checkpoint(layer, x, use_reentrant=False, context_fn=self.checkpointed)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant")
        return x


class Layer(nn.Module):
    def __init__(self, dropout, inplace):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation, self.dropout = nn.ReLU(inplace), nn.Dropout(dropout, inplace)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.dropout(self.out(self.activation(self.linear(x))))


class Counting(Layer):
    """It changes its buffers, in place and by others, and its result depends on them."""

    def __init__(self, dropout, inplace):
        super().__init__(dropout, inplace)
        self.counts = False  # in evaluation, too
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x):
        if self.training or self.counts:
            self.mean = 0.9 * self.mean + x.detach().mean()
        return super().forward(self.norm(x)) * self.mean


class Attending(nn.Module):
    """A transformer over one sequence of `ROWS`."""

    def __init__(self, depth=8, heads=4):
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock(heads) for _ in range(depth))

    def forward(self, x):
        x = x.unsqueeze(0)
        for block in self.blocks:
            x = block(x)
        return x


class AttentionBlock(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, rows, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, rows, WIDTH))


def batch(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def train_once(model, saving):
    """Forward in `saving()`, backward outside."""
    x = batch().requires_grad_()  # which a checkpoint of the older kind needs
    with saving():
        loss = model(x).float().square().mean()
    loss.backward()


def gradients(make, body, *open_swapper):
    """Gradients and buffers that `body(model, saving)` leaves, or torch's error that it ends with, and statistics."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    with contextlib.ExitStack() as stack:
        swapper = stack.enter_context(open_swapper[0](model)) if open_swapper else None
        try:
            body(model, swapper.saving if swapper else contextlib.nullcontext)
            found = {name: param.grad for name, param in model.named_parameters()} | dict(model.named_buffers())
        except RuntimeError as error:
            found = str(error)
        return found, swapper.stats() if swapper else None


def assert_same_gradients(make, body, config):
    """With what is saved elsewhere: the same bits, or the same error, and nothing left. Returns the statistics."""
    expected, _ = gradients(make, body)
    actual, stats = gradients(make, body, lambda model: ActivationSwapper(config, model=model))
    if isinstance(expected, str):
        assert expected.split("[")[0] in actual
    else:
        assert_same_bits(list(actual.values()), list(expected.values()))
    return stats

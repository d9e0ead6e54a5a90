"""A model of normalized residual blocks that can be cut into stages, and batches for it.

Large and well-conditioned enough that roundings average out: what two ways of rounding differ by in its losses and
norms is far below 1e-3, where it would be above that in a model of a few hundred weights and tokens.
"""

import torch
from torch import nn

from tests.support import build
from tests.support.sharded_model import gathered

VOCABULARY, WIDTH, NUM_BLOCKS = 101, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Part(nn.Module):
    """The blocks of one stage, or all of them; names and weights do not depend on how the model is cut."""

    def __init__(self, numbers=range(NUM_BLOCKS)):
        super().__init__()
        torch.manual_seed(0)
        whole = {str(number): Block() for number in range(NUM_BLOCKS)}
        embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.embedding = embedding if 0 in numbers else None
        self.blocks = nn.ModuleDict({str(number): whole[str(number)] for number in numbers})
        self.head = head if NUM_BLOCKS - 1 in numbers else None

    def forward(self, hidden):
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden if self.head is None else self.head(hidden)


def batch(step, dp_rank, samples=8, tokens=32):
    """Tokens and targets [samples, tokens]; targets are not the inputs, so that gradients stay large."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    inputs = torch.randint(0, VOCABULARY, (samples, tokens), generator=generator)
    return inputs, (inputs * 7 + 3) % VOCABULARY


def loss_of(output, target):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def train(engine, dp_rank, steps, samples=8):
    """Every step is one batch of `samples`, cut into the engine's micro-batches; returns losses and norms."""
    count = engine.gradient_accumulation_steps

    def loss(engine, step, micro):
        tokens, targets = (part.chunk(count)[micro] for part in batch(step, dp_rank, samples))
        return loss_of(engine(tokens), targets)

    return build.train(engine, range(steps), loss)


def named_state(engine):
    """Parameters, masters and moments, whole, by the names of the model."""
    names = [name for name, _ in engine.module.named_parameters()]
    tensors = {name: param.detach() for name, param in engine.module.named_parameters()}
    for index, entries in engine.optimizer.state_dict()["state"].items():
        tensors |= {f"{names[index]}.{name}": value for name, value in entries.items()}
    return gathered(tensors)


def weights(state):
    """All weights of a `named_state` as one vector."""
    return torch.cat([value.flatten() for name, value in state.items() if name.endswith(("weight", "bias"))])

"""A durable run that is killed in the middle of its second epoch: whose loader goes on, and whose does not."""

import os
import signal
from functools import partial
from importlib.util import find_spec
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from nvme_offload import get_full_param, initialize
from tests.support.build import section
from tests.support.killed_steps import digest_of
from tests.support.ranks import run_ranks

NUM_ROWS, BATCH, EPOCHS = 48, 4, 3


def drawn(rank, ranks, folder, state):
    """The loader of docs/durable.md: each epoch has a seed, and what was seen is passed over."""
    begin = state or (0, 0)
    for epoch in range(begin[0], EPOCHS):
        sampler = DistributedSampler(range(NUM_ROWS), ranks, rank)
        sampler.set_epoch(epoch)
        more = {"sampler": sampler} if ranks > 1 else {"shuffle": True}
        loader = DataLoader(range(NUM_ROWS), BATCH, generator=torch.Generator().manual_seed(epoch), **more)
        for position, batch in enumerate(loader):
            if (epoch, position) >= begin:
                yield batch, (epoch, position + 1)


def stateful(rank, ranks, folder, state, *, workers=0, generator=False, sampler=False):
    from torchdata.stateful_dataloader import StatefulDataLoader

    shards = DistributedSampler(range(NUM_ROWS), ranks, rank) if ranks > 1 else None
    more = {"sampler": shards} if ranks > 1 else {"shuffle": True}
    if workers:
        more["multiprocessing_context"] = "fork"  # else workers outlive a rank that is killed
    if generator:
        more["generator"] = torch.Generator().manual_seed(1)
    if sampler:
        more = {"sampler": RandomSampler(range(NUM_ROWS), generator=torch.Generator().manual_seed(1))}
    loader = StatefulDataLoader(range(NUM_ROWS), BATCH, num_workers=workers, **more)
    begin, saved = state or (0, None)
    if saved is not None:
        loader.load_state_dict(saved)
    for epoch in range(begin, EPOCHS):
        if shards is not None:
            shards.set_epoch(epoch)
        for batch in loader:
            yield batch, (epoch, loader.state_dict())


def grain(rank, ranks, folder, state):
    import grain

    shard = grain.sharding.ShardOptions(rank, ranks)
    sampler = grain.samplers.IndexSampler(NUM_ROWS, shard, shuffle=True, num_epochs=EPOCHS, seed=1)
    rows = grain.sources.RangeDataSource(0, NUM_ROWS, 1)
    found = iter(grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(BATCH)]))
    if state is not None:
        found.set_state(state.encode())
    for batch in found:
        yield torch.as_tensor(batch), found.get_state().decode()


def mosaic(rank, ranks, folder, state):
    import streaming

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    if rank == 0:
        streaming.base.util.clean_stale_shared_memory()
        if not (folder / "rows").exists():
            with streaming.MDSWriter(out=str(folder / "rows"), columns={"row": "int"}) as writer:
                for row in range(NUM_ROWS):
                    writer.write({"row": row})
    dist.barrier()
    rows = streaming.StreamingDataset(local=str(folder / "rows"), shuffle=True, batch_size=BATCH)
    loader = streaming.StreamingDataLoader(rows, batch_size=BATCH)
    if state is not None:
        loader.load_state_dict(state)
    for _ in range(state["epoch"] if state else 0, EPOCHS):
        for batch in loader:
            yield batch["row"], loader.state_dict()


def accelerated(rank, ranks, folder, state, *, seedable=True):
    import accelerate

    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(range(NUM_ROWS), BATCH, shuffle=True))
    begin, done = state or (0, 0)
    for epoch in range(begin, EPOCHS):
        loader.set_epoch(epoch)
        skipped = done if epoch == begin else 0
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for position, batch in enumerate(rest, skipped + 1):
            yield batch, (epoch, position)


BITS, ROWS, NEITHER = (True, True), (True, False), (False, False)
"""The rows go on where they were in the second epoch, and the weights end with the same bits."""
LOADERS = {
    "drawn": ("torch", drawn, False, BITS),
    "shuffle": ("torchdata", stateful, True, BITS),
    "shuffle, workers": ("torchdata", partial(stateful, workers=2), True, BITS),
    "shuffle, not forked": ("torchdata", stateful, False, ROWS),
    "generator, workers": ("torchdata", partial(stateful, workers=2, generator=True), False, BITS),
    "generator": ("torchdata", partial(stateful, generator=True), True, NEITHER),
    "sampler": ("torchdata", partial(stateful, sampler=True), True, NEITHER),
    "grain": ("grain", grain, False, BITS),
    "mosaicml-streaming": ("streaming", mosaic, True, BITS),
    "seedable": ("accelerate", accelerated, True, BITS),
    "accelerate": ("accelerate", partial(accelerated, seedable=False), True, NEITHER),
}
"""The package, the batches with the place behind each, whether they begin with a copy of torch's random numbers where a
run goes on, and what is the same then."""


ALONE = {"mosaicml-streaming"}
"""Its shared memory stays when ranks of one host are killed, and the next ones may disagree about its name."""


def train(rank, ranks, name, folder, run, kill_at):
    """Return the step it began at, all rows that it saw, and a digest of the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 8))
    data = torch.randn(NUM_ROWS, 8)
    keys = section(folder)
    keys["zero_optimization"]["offload_optimizer"]["durable"] = run
    with initialize(model, keys) as engine:
        torch.manual_seed(rank)
        begin, state = engine.resume() or (0, {"loader": None})
        seen = []
        _, batches, forks, _ = LOADERS[name]
        numbered = batches(rank, ranks, folder, state["loader"])
        with torch.random.fork_rng(devices=[], enabled=forks and begin > 0):
            first = next(numbered)
        for rows, place in chain([first], numbered):
            if begin + len(seen) == kill_at:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            engine.backward((engine(data[rows]) - data[rows]).square().mean())
            engine.client_state["loader"] = place
            engine.step()
            seen.append(sorted(rows.tolist()))
        return begin, seen, digest_of([get_full_param(param) for param in engine.module.parameters()])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[pytest.mark.slow] * ((name, ranks) != ("drawn", 2)))
        for name in LOADERS
        for ranks in (1, 2)
        if ranks == 1 or not (LOADERS[name][3] == NEITHER or name in ALONE)
    ],
)
def test_killed_in_the_second_epoch_the_data_goes_on_or_does_not(tmp_path, name, ranks):
    package, *_, same = LOADERS[name]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    kill_at = NUM_ROWS // BATCH // ranks * 3 // 2
    with pytest.raises(AssertionError):
        run_ranks(train, ranks, name, tmp_path, "killed", kill_at)
    resumed, whole = (run_ranks(train, ranks, name, tmp_path, run, None) for run in ("killed", "whole"))
    for (begin, rest, ended), (_, rows, digest) in zip(resumed, whole, strict=True):
        assert kill_at - 1 <= begin <= kill_at
        assert (rest == rows[begin:], ended == digest) == same

"""Old weights and a patch are the weights, bit for bit; a chain of patches is right, or refused."""

import copy
import hashlib
import json
import random
import resource
import time

import pytest
import torch
from torch import nn

from nvme_offload import OffloadAdamW, StateError, WeightsError, apply_patch, initialize, save_patch
from tests.support import tiers
from tests.support.drawn_patches import bits, differing, drawn, patched, run, whole
from tests.support.forked import lines_of
from tests.support.ranks import on_ranks
from tests.support.rules import CASES
from tests.support.sharded_model import SHARDS_CODES
from tests.support.training import noted, section

pytestmark = pytest.mark.usefixtures("one_thread")


class Small(nn.Module):
    """A frozen matrix, a buffer that each forward changes, a transposed weight, one in fp32, one that is never used."""

    def __init__(self, dtype):
        super().__init__()
        self.wide = nn.Linear(300, 257).to(dtype)
        self.turned = nn.Parameter((torch.randn(257, 300) * 0.1).to(dtype).t())
        self.norm = nn.BatchNorm1d(300)
        self.frozen = nn.Parameter(torch.randn(30, 30).to(dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(70_001).to(dtype))


def take_step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if param.requires_grad and name != "unused":
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    model.norm.train()(torch.randn(4, 300, generator=generator))
    optimizer.step()
    optimizer.zero_grad()


MOMENTUM, SGD = CASES[-1], next(case for case in CASES if case.name == "SGD")


@pytest.mark.parametrize(
    ("case", "dtype", "place"),
    [
        (CASES[0], torch.bfloat16, "cpu"),
        (CASES[0], torch.bfloat16, "durable"),
        (CASES[0], torch.float16, "nvme"),
        (CASES[0], torch.float32, "durable"),
        (MOMENTUM, torch.bfloat16, "nvme"),
        (SGD, torch.float16, "durable"),
    ],
    ids=str,
)
def test_a_plain_module_follows_by_patches(case, dtype, place, tmp_path):
    torch.manual_seed(0)
    model = Small(dtype)
    config = section(None if place == "cpu" else tmp_path, sub_group_size=65536)
    if place == "durable":
        config["zero_optimization"]["offload_optimizer"] |= {"durable": "run", "rewrite_every": 3}
    follower = copy.deepcopy(model)
    with case.make(model.parameters(), config, lr=1e-5) as optimizer:
        version, sizes = optimizer.weights_version, []
        apply_patch(follower, optimizer.weights(model, since=""), at=version)
        version = optimizer.weights_version
        for number in range(7):
            if number == 2:
                model.wide.weight.data[3, 5] += 1  # noticed by nobody but the checksums
            if number == 3:
                model.frozen.data.mul_(2)
                model.norm.weight.data.add_(1)
            if number == 4 and "master" in (entries := optimizer.state[model.turned]):
                entries["master"] = entries["master"] * 2
            if number != 5:
                take_step(model, optimizer, number)
            patch = optimizer.weights(model, since=version)
            assert patch.since == version, patch
            version = apply_patch(follower, patch)
            assert version == optimizer.weights_version == patch.version
            ours, theirs = model.state_dict(), follower.state_dict()
            assert [name for name in ours if not torch.equal(bits(ours[name]), bits(theirs[name]))] == []
            sizes.append(version)
        assert len(set(sizes)) == 6  # another version with each change, and the same one without


def test_an_unused_weight_is_not_in_a_patch_and_few_words_are(tmp_path):
    torch.manual_seed(0)
    model = Small(torch.bfloat16)
    with OffloadAdamW(model.parameters(), lr=1e-6, offload=section(tmp_path)) as optimizer:
        version = optimizer.weights_version
        take_step(model, optimizer, 0)
        changes = {change.name: change for change in optimizer.weights(model, since=version)}
        assert changes.keys() == set(model.state_dict()) - {"unused"}  # what has no marks comes once
        take_step(model, optimizer, 1)
        change = {change.name: change for change in optimizer.weights(model, since=optimizer.weights_version)}["turned"]
        assert change.size_bytes < 0.06 * 2 * 300 * 257
        assert changes["wide.weight"].indices is not None


def test_what_is_unknown_gives_all_weights_and_says_why(tmp_path):
    model = Small(torch.bfloat16)
    with OffloadAdamW(model.parameters(), lr=1e-3, offload=section(tmp_path)) as optimizer:
        with pytest.warns(RuntimeWarning, match="nobody had asked for versions before, so the patch has all weights"):
            patch = optimizer.weights(model, since="another-0")
        have, sparse = patched({}, patch)
        assert (patch.since, sparse, have.keys()) == (None, 0, model.state_dict().keys())
        first = optimizer.weights_version
        take_step(model, optimizer, 0)
        assert optimizer.weights(model, since=first).since == first  # nobody went through it
        taken = optimizer.weights(model, since=first)
        patched(have, taken)
        with pytest.warns(RuntimeWarning, match="not known any more"):
            assert optimizer.weights(model, since=first).since is None
        assert optimizer.weights(model, since=taken.version).since == taken.version
        stale = iter(optimizer.weights(model, since=taken.version))
        take_step(model, optimizer, 1)
        with pytest.raises(StateError, match="a change since then"):
            list(stale)
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.warns(RuntimeWarning, match="all weights"):
            assert optimizer.weights(model, since=taken.version).since is None


@pytest.mark.parametrize("shapes", ["the same", "others"])
def test_parameters_that_are_exchanged_before_the_first_step_are_sent_whole(shapes, tmp_path):
    model = Small(torch.bfloat16)
    with OffloadAdamW(model.parameters(), lr=1e-5, offload=section(tmp_path)) as optimizer:
        version = optimizer.weights_version
        for name, param in list(model.named_parameters()):
            numel = 1 if shapes == "the same" else 2
            other = nn.Parameter(torch.randn(numel, *param.shape).squeeze(0).to(param.dtype), param.requires_grad)
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], other)
        optimizer.param_groups[0]["params"] = list(model.parameters())[::-1]
        take_step(model, optimizer, 0) if shapes == "the same" else None
        with pytest.warns(RuntimeWarning, match="so the patch has all weights"):
            patch = optimizer.weights(model, since=version)
        have, _ = patched({}, patch)
        assert all(torch.equal(bits(have[name]), bits(value)) for name, value in model.state_dict().items())
        assert optimizer.weights(model, since=patch.version).since == patch.version


def test_a_resumed_run_knows_the_version_of_its_commit(tmp_path):
    def made():
        torch.manual_seed(0)
        model = Small(torch.bfloat16)
        config = section(tmp_path, sub_group_size=65536)
        config["zero_optimization"]["offload_optimizer"] |= {"durable": "run", "rewrite_every": 3}
        return model, OffloadAdamW(model.parameters(), lr=1e-5, offload=config)

    model, optimizer = made()
    with optimizer:
        for step in range(3):
            take_step(model, optimizer, step)
        version, have = optimizer.weights_version, copy.deepcopy(model.state_dict())
    model, optimizer = made()
    with optimizer:
        optimizer.resume()
        model.load_state_dict(
            {name: value for name, value in have.items() if name not in dict(model.named_parameters())}, strict=False
        )
        assert optimizer.weights_version == version
        take_step(model, optimizer, 3)
        patch = optimizer.weights(model, since=version)
        assert patch.since == version
        have, sparse = patched(have, patch)
        assert sparse > 0
        assert all(torch.equal(bits(have[name]), bits(value)) for name, value in model.state_dict().items())


def sparse_steps(folder, schedule):
    """Return an engine whose steps change few words."""
    places = {"state": "nvme"} if schedule == "speculate" else tiers.EVERYTHING
    config = tiers.section(folder, **places, accumulation=1)
    config |= {"overlap_step": schedule, "gradient_clipping": 30.0 * (schedule != "backward")}
    config |= {"skip_non_finite": False} if schedule == "backward" else {}
    config["optimizer"]["params"] = {"lr": 1e-6}
    if schedule == "speculate":
        config["zero_optimization"]["offload_optimizer"] |= {"durable": "run", "rewrite_every": 1}
    torch.manual_seed(0)
    model = tiers.Model(num_layers=3, width=129, tied=False)
    for layer in model.layers:
        nn.init.ones_(layer.norm.bias)  # of zeros all words would change
    return initialize(model, config)


def step_of(engine, number):
    engine.backward(tiers.loss_of(engine, number))
    engine.step()


@pytest.mark.parametrize(("schedule", "world_size"), [("off", 1), ("forward", 2), ("backward", 1)])
@on_ranks("world_size")
def test_a_patch_after_as_many_steps_as_the_one_before_takes_no_block(rank, world_size, schedule, tmp_path):
    with sparse_steps(tmp_path, schedule) as engine:
        version, have, used, number = engine.weights_version, whole(engine, "own"), [], 0
        for steps in (1, 1, 2, 2, 2, 1):
            for _ in range(steps):
                step_of(engine, number := number + 1)
            engine.optimizer.synchronize()
            before = engine.optimizer.stats().param_uses
            patch = engine.weights(since=version)
            have, sparse = patched(have, patch)
            used.append(engine.optimizer.stats().param_uses > before)
            assert sparse > 0
            assert differing(have, engine, "own") == []
            version = patch.version
        assert used == [False, False, True, False, False, True]


def test_what_a_guess_left_and_was_taken_back_is_in_no_patch(alone, monkeypatch, tmp_path):
    tiers.be_eager(monkeypatch)
    with sparse_steps(tmp_path, "speculate") as engine:
        version, have = engine.weights_version, whole(engine, "own")
        for number in range(3):
            step_of(engine, number)
            patch = engine.weights(since=version)
            have, version = patched(have, patch)[0], patch.version
        engine.backward(tiers.loss_of(engine, 3))
        assert tiers.wait_for_guessed(engine.optimizer)
        engine.optimizer.zero_grad()
        engine.module.uses = engine.module.uses[:-1]  # the last layer is as it was before
        step_of(engine, 4)
        assert engine.optimizer.stats().updates_taken_back > 0
        assert differing(patched(have, engine.weights(since=version))[0], engine, "own") == []


@SHARDS_CODES
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_drawn_chains_are_the_weights(ranks, tmp_path):
    cases = drawn(random.Random(ranks), 2, ranks=ranks)
    assert [wrong for wrong, _ in run(tmp_path, cases) if wrong and not wrong.startswith("refused")] == []


def small_patches(folder, steps=4):
    """Return a model as it was, and after steps, each written as a patch."""
    torch.manual_seed(0)
    model = Small(torch.bfloat16)
    before = copy.deepcopy(model)
    with OffloadAdamW(model.parameters(), lr=1e-4, offload=section(folder)) as optimizer:
        version = ""
        for step in range(steps):
            take_step(model, optimizer, step)
            patch = optimizer.weights(model, since=version)
            save_patch(patch, folder / "patches")
            version = patch.version
    return before, model, version


def test_a_chain_of_files_is_followed_from_wherever_a_model_is(tmp_path):
    before, model, version = small_patches(tmp_path)
    other = copy.deepcopy(before)
    links = json.loads((tmp_path / "patches" / "versions.json").read_text())["patches"]
    assert [link["since"] for link in links] == [None, *(link["version"] for link in links[:-1])]
    assert apply_patch(before, tmp_path / "patches") == version == apply_patch(before, tmp_path / "patches")
    ours, theirs = before.state_dict(), model.state_dict()
    assert all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "versions.json").write_text(json.dumps({"format": 1, "patches": links[1:]}))
    with pytest.raises(StateError, match="a patch since elsewhere, or one of all weights"):
        apply_patch(other, tmp_path / "cut", at="elsewhere")


def test_a_broken_chain_or_file_is_refused_and_a_whole_patch_heals_it(tmp_path):
    before, _, version = small_patches(tmp_path)
    folder = tmp_path / "patches"
    index, files = folder / "versions.json", sorted(folder.glob("*.safetensors"))
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "patches": [content["patches"][0], content["patches"][2]]}))
    with pytest.raises(WeightsError, match="do not follow each other"):
        apply_patch(before, folder)
    index.write_text(json.dumps(content))
    damaged = bytearray(files[2].read_bytes())
    damaged[-5] ^= 1
    files[2].write_bytes(damaged)
    with pytest.raises(WeightsError, match="the file is damaged"):
        apply_patch(before, folder)
    model = Small(torch.bfloat16)
    with OffloadAdamW(model.parameters(), lr=1e-4, offload=section(tmp_path)) as optimizer:
        with pytest.raises(StateError, match=f"a patch since {version}, actual one since "):
            save_patch(optimizer.weights(model, since=optimizer.weights_version), folder)
        index.unlink()
        index.symlink_to(index.name)
        with pytest.raises(WeightsError, match="cannot be read: Too many levels"):
            save_patch(optimizer.weights(model, since=optimizer.weights_version), folder)
        index.unlink()
        patch = optimizer.weights(model, since="")
        index.write_text("{")
        (folder / "adapters.safetensors").touch()  # somebody else's
        (folder / ".00000005.safetensors.1").touch()  # of a writer that was killed
        file = save_patch(patch, folder)
        assert apply_patch(before, folder) == patch.version
    assert {each.name for each in folder.iterdir()} == {file.name, index.name, "adapters.safetensors"}
    assert [link["since"] for link in json.loads(index.read_text())["patches"]] == [None]
    with pytest.raises(WeightsError, match=r"turned of shape \(300, 257\): the model has no such weight"):
        apply_patch(nn.Linear(2, 2), folder)


INDEX_ENTRIES = {
    "no digest": lambda link: link.pop("sha256"),
    "no version": lambda link: link.pop("version"),
    "nothing sparse": lambda link: link.update(sparse=None),
    "no shape": lambda link: link.update(sparse={"turned": "ab"}),
    "sparse elsewhere": lambda link: link.update(sparse={"elsewhere": [300, 257]}),
}


def test_a_patch_that_no_disk_holds_leaves_the_folder_as_it_was_and_says_what_to_do(tmp_path):
    model, _, version = small_patches(tmp_path, steps=2)
    folder = tmp_path / "patches"
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    other = nn.Linear(64, 64).bfloat16()
    with OffloadAdamW(other.parameters(), lr=1e-4, offload=section(None)) as optimizer:
        patch = optimizer.weights(other, since="")
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, -1))
        try:
            with pytest.raises(OSError, match="the folder is as it was: File too large; free space") as refused:
                save_patch(patch, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert refused.value.filename == str(folder / "00000003.safetensors")
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    assert apply_patch(model, folder) == version


def test_damage_anywhere_is_refused_before_anything_has_changed(tmp_path):
    model, _, version = small_patches(tmp_path)
    folder = tmp_path / "patches"
    index, file = folder / "versions.json", folder / "00000004.safetensors"
    whole, content = index.read_text(), file.read_bytes()
    links = json.loads(whole)["patches"]
    index.write_text(json.dumps({"format": 1, "patches": links[:2]}))
    have = digest_of(model) if apply_patch(model, folder) == links[1]["version"] else ""

    def refused(what):
        with noted(what), pytest.raises(WeightsError):
            apply_patch(model, folder)
        assert digest_of(model) == have

    for what, spoil in INDEX_ENTRIES.items():
        spoilt = json.loads(whole)
        spoil(spoilt["patches"][3])
        index.write_text(json.dumps(spoilt))
        refused(what)
    index.write_text(whole)
    for place in range(0, len(content), 41):
        if place < 1200 or place % 4001 < 41:
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            refused(f"byte {place}")
    file.write_bytes(content)
    assert apply_patch(model, folder) == version


def test_a_file_takes_three_bytes_for_each_changed_word_and_more_only_where_they_lie_far_apart(tmp_path):
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(2_000_000).bfloat16())})
    apart = torch.tensor([1, 1, 254, 255, 256, 257, 510, 511, 512, 100_000, *[27] * 70_000])
    changed = torch.cumsum(apart, 0) - 1
    before = copy.deepcopy(model)
    with OffloadAdamW(model.parameters(), lr=1.0, weight_decay=0.0, offload=section(tmp_path)) as optimizer:
        version = optimizer.weights_version
        save_patch(optimizer.weights(model, since=""), tmp_path / "patches")
        model.weight.grad = torch.zeros_like(model.weight).index_fill_(0, changed, 1.0)
        optimizer.step()
        file = save_patch(optimizer.weights(model, since=version), tmp_path / "patches")
    bytes_of_gaps = len(apart) + int(((apart - 1) // 255).sum())
    assert file.stat().st_size < bytes_of_gaps + 2 * len(apart) + 4096
    assert int((model.weight != before.weight).sum()) == len(apart)
    apply_patch(before, tmp_path / "patches", at=version)
    assert torch.equal(bits(before.weight), bits(model.weight))


WRITES = """
import sys
from pathlib import Path
from tests.optim.test_weight_patches import *
folder = Path(sys.argv[1])
torch.set_num_threads(1)
model = Small(torch.bfloat16)
with OffloadAdamW(model.parameters(), lr=1e-4, offload=section(folder)) as optimizer:
    version = ""
    for step in range(1000):
        take_step(model, optimizer, step)
        patch = optimizer.weights(model, since=version)
        save_patch(patch, folder / "patches")
        version = patch.version
        print(version, digest_of(model), flush=True)
"""


def digest_of(model):
    return hashlib.sha256(b"".join(bits(each).numpy().tobytes() for each in model.state_dict().values())).hexdigest()


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_whoever_writes_may_be_killed_at_any_moment(kills, tmp_path):
    follower, chance = Small(torch.bfloat16), random.Random(0)
    for _ in range(kills):
        with lines_of(WRITES, tmp_path) as (writer, lines):
            heard = [lines.readline() for _ in range(chance.randrange(1, 5))]
            time.sleep(chance.random() * 0.05)
            writer.kill()
            heard += lines.readlines()
        said = dict(line.split() for line in heard if line.endswith("\n"))
        version = apply_patch(follower, tmp_path / "patches")
        assert apply_patch(follower, tmp_path / "patches") == version
        assert said.get(version, digest_of(follower)) == digest_of(follower)  # the latest may not have been said
        assert version.split("-")[0] in {known.split("-")[0] for known in said}

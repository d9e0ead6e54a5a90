"""Chains of patches over trainings whose configuration is drawn: old weights and a patch are the weights, bit for bit.

    python -m tests.support.drawn_patches FOLDER --chains 300 --seed 0

Between two patches come some of: steps, a parameter that is set, a buffer or a frozen weight that is edited, a
checkpoint that is loaded, a rewind, and an iteration that is given up. A chain that goes wrong is printed.
"""

import argparse
import ast
import random
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from nvme_offload import ConfigError, StateError, get_full_param, initialize, set_full_param
from tests.support.drawn_runs import COLUMNS, DTYPES, config_of, draw, model_of, take_step
from tests.support.ranks import run_ranks
from tests.support.tiers import be_eager

AT_ONCE, EVENTS = 8, 7
DTYPE_NAMES = ["own", "own", "own", "bf16", "fp32", "fp16"]


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def whole(engine, dtype):
    return {name: value.clone() for name, value in engine.weights(dtype)}


def patched(have, patch):
    """Return weights with a patch, and how much of it was sparse."""
    have, sparse = dict(have), 0
    for name, shape, dtype, values, indices in patch:
        if indices is None:
            have[name] = values.clone().view(shape)
            continue
        assert (indices.dtype, values.dtype, dtype) == (torch.int32, dtype, have[name].dtype)
        assert bool((indices[1:] > indices[:-1]).all())
        flat = have[name].reshape(-1).clone()
        flat[indices.long()] = values
        have[name], sparse = flat.view(shape), sparse + 1
    return have, sparse


def differing(have, engine, dtype):
    now = whole(engine, dtype)
    assert have.keys() == now.keys()
    return [name for name, value in now.items() if not torch.equal(bits(have[name]), bits(value))]


def event(engine, case, chance, folder, step):
    """Let something happen to the weights; return whether versions of before are unknown from here on."""
    what = chance.choice(["step"] * 6 + ["set", "edit", "load", "rewind" if case["every"] else "step"])
    params = dict(engine.named_parameters())
    if what == "step":
        take_step(engine, case, step)
    elif what == "set":
        name = chance.choice([name for name, param in params.items() if param.is_floating_point()])
        param = params[name]
        set_full_param(param, get_full_param(param) * 1.5)
    elif what == "edit":
        frozen = [param for param in params.values() if not param.requires_grad and param.is_floating_point()]
        for param in frozen[:1]:
            set_full_param(param, get_full_param(param) + 0.25)
    elif what == "load":
        engine.save_checkpoint(folder / "saved")
        take_step(engine, case, step)
        engine.load_checkpoint(folder / "saved")
    elif what == "rewind":
        try:
            engine.rewind()
        except StateError:  # that step is not kept
            return False
    return what in ("load", "rewind")


def chain(folder, case, seed):
    """Return what was wrong, and how many changes came as indices."""
    chance, sparse = random.Random(seed), 0
    with pytest.MonkeyPatch.context() as patch:
        be_eager(patch)
        with initialize(model_of(case), config_of(folder, case, None)) as engine:
            dtype, step, slower = chance.choice(DTYPE_NAMES), 0, chance.choice((1, 1e-3, 1e-4))
            for group in engine.optimizer.param_groups:
                group["lr"] *= slower  # then few words change, and patches are sparse
            version, have = engine.weights_version, whole(engine, dtype)
            for number in range(EVENTS):
                unknown = False
                for _ in range(chance.choice((0, 1, 1, 2))):
                    unknown |= event(engine, case, chance, folder, step)
                    step += 1
                if chance.random() < 0.2:
                    given_up = engine.weights(dtype, since=version)  # then the version stays known
                    version = version if next(iter(given_up), None) else given_up.version
                found = engine.weights(dtype, since=version)
                if unknown and found.since is not None:
                    return f"event {number}: {version} is not what {found!r} follows", sparse
                if not unknown and found.since != version:
                    return f"event {number}: {version} was forgotten: {found!r}", sparse
                have, some = patched(have, found)
                sparse, version = sparse + some, found.version
                if wrong := differing(have, engine, dtype):
                    return f"event {number}, {dtype}, {found!r}: {wrong}", sparse
                if version != engine.weights_version:
                    return f"event {number}: {version} is not the version of the weights", sparse
    return "", sparse


def check(rank, world_size, path, cases):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for number, (case, seed) in enumerate(cases):
        folder = path / f"{number}"
        folder.mkdir(exist_ok=True)
        try:
            found.append(chain(folder, case, seed))
        except ConfigError as refused:
            found.append((f"refused: {refused}", 0))
    return found


def run(root, cases):
    """Run chains of one number of ranks; return what was wrong with each, or nothing, and their sparse changes."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        try:
            said = run_ranks(check, cases[0][0]["ranks"], Path(folder), cases)
        except AssertionError as failed:
            if len(cases) == 1:
                return [(f"failed: {failed}", 0)]
            return [wrong for case in cases for wrong in run(root, [case])]
    each = zip(*said, strict=True)
    return [(" ".join(dict.fromkeys(filter(None, (wrong for wrong, _ in own)))), own[0][1]) for own in each]


def drawn(chance, number, **fixed):
    assert COLUMNS["precision"] == list(DTYPES)
    return [(draw(chance, **fixed), chance.randrange(1 << 30)) for _ in range(number)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chains", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, help="of all chains; drawn, if it is left out")
    parser.add_argument("--case", type=ast.literal_eval, help="as it was printed")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    fixed = {} if given.ranks is None else {"ranks": given.ranks}
    cases = [given.case] if given.case else drawn(random.Random(given.seed), given.chains, **fixed)
    report = {"chains": 0, "refused": 0, "wrong": 0, "sparse changes": 0}
    for ranks in sorted({case["ranks"] for case, _ in cases}):
        alike = [case for case in cases if case[0]["ranks"] == ranks]
        for first in range(0, len(alike), AT_ONCE):
            part = alike[first : first + AT_ONCE]
            for case, (wrong, sparse) in zip(part, run(given.folder, part), strict=True):
                report["chains"] += 1
                report["sparse changes"] += sparse
                report["refused" if wrong.startswith("refused") else "wrong"] += bool(wrong)
                if wrong:
                    sys.stdout.write(f"{wrong[-2000:]}\n  --case {case!r}\n")
            sys.stdout.write(f"{report}\n")
            sys.stdout.flush()
    return bool(report["wrong"])


if __name__ == "__main__":
    from tests.support import drawn_patches

    sys.exit(drawn_patches.main())

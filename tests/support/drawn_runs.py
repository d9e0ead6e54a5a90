"""Runs whose configuration is drawn, each beside the same run in memory, in the plain order: every bit is the same.

    python -m tests.support.drawn_runs FOLDER --runs 1000 --kills 400 --seed 0

Drawn are rule, precision, frozen base and whether it is read in place, stage, tiers, activations, buffers, schedule,
order, which blocks are used, what overflows, ranks, and how long state lasts.
Staging buffers are guarded meanwhile (`views_out`). What lasts is killed, too (`killed_steps`). A case that goes wrong
is printed; ``--case`` runs it again, ``--mistake`` puts the one back that the guard is for.
"""

import argparse
import ast
import json
import random
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import nn

from nvme_offload import ConfigError, initialize
from tests.support.engine_tools import PYTHON_ENGINE
from tests.support.forked import fork_here
from tests.support.killed_steps import KINDS, Kind, be_ready_to_fork, digest_of, kill, steps_left
from tests.support.ranks import be_alone, run_ranks
from tests.support.rules import CASES, IN_INT8
from tests.support.sharded_model import full_state
from tests.support.tiers import PRECISIONS, Layer, Model, be_eager, loss_of, section
from tests.support.views_out import end_all_but_the_latest, watch

WIDTH, LAYERS, STEPS = 34, 4, 4
WIDE = 64  # of rules that keep states in 8 bits, for rows that have blocks
AT_ONCE = 9  # cases that one start of the ranks goes through
ALIKE = 3  # cases that are compared with the same run in memory
RULES = {str(case): {"type": case.name, "params": case.section_params} for case in (*CASES, *IN_INT8)}
RULES["Muon"] = {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-3}}
IN_FP16 = {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"initial_scale_power": 8}}
DTYPES = PRECISIONS | {"autocast in fp16": PRECISIONS["autocast"] | IN_FP16}
COLUMNS = {
    "rule": list(RULES),
    "precision": list(DTYPES),
    "base": [None, "frozen", "rounded", "uint8", "packed"],
    "in_place": [False, False, True],
    "count": [1, 2, 3],
    "clip": [0.0, 0.0, 0.5],
    "ranks": [1, 2, 2],
    "stage": [1, 2, 3, 3],
    "uses": [None, None, ((0, 1, 2, 3), (2, 0), (3, 3, 1), ())],
    "checkpointing": [False, False, True],
    "overflows": [False, False, True],
    "params": ["none", "cpu", "nvme", "nvme", "nvme"],
    "grads": ["none", "cpu", "nvme", "nvme"],
    "state": ["cpu", "nvme", "nvme"],
    "keep": [None, None, "boundaries", "attention", "all"],
    "schedule": ["off", "forward", "backward", "backward", "speculate"],
    "order": ["horizontal", "vertical"],
    "ahead": [0, 1, 2],
    "every": [0, 1, 3],
    "buffers": [2, 3, 3, 4],
    "parks": [False, False, True],
    "aio": [("auto", 32, "1MiB"), (PYTHON_ENGINE, 1, "64KiB"), ("aiofiles", 4, "64KiB")],
}
IN_MEMORY = {"params": "none", "grads": "none", "state": "cpu", "keep": None, "schedule": "off", "order": "horizontal"}
IN_MEMORY |= {"ahead": 0, "every": 0, "parks": False, "in_place": False}
BASE = "base.safetensors"
KEPT = {"bf16": torch.bfloat16, "bf16 added up in fp32": torch.bfloat16, "fp16": torch.float16}
"""The base is kept so; in other precisions as it came."""
OF_THE_RUN = COLUMNS.keys() - IN_MEMORY.keys() - {"buffers", "aio"}
"""The run in memory has these columns of a case."""


def allowed(case):
    """Other tests hold what the section refuses."""
    exact = case["clip"] == 0.0 and not case["precision"].endswith("fp16") and not case["overflows"]
    plain = case["order"] == "horizontal" and not case["ahead"]
    return (
        (case["schedule"] != "backward" or exact)
        and (case["schedule"] != "speculate" or case["every"] > 0)
        and (not case["every"] or case["state"] == "nvme")
        and (not case["ahead"] or case["order"] == "horizontal")
        and (not case["uses"] or plain)
        and (not case["checkpointing"] or case["keep"] is None)
        and (not case["in_place"] or (case["base"] not in (None, "frozen") and case["params"] == "nvme"))
        and (case["stage"] == 3 or case["order"] == "vertical" or case["params"] == case["grads"] == "none")
        and {case["params"], case["grads"], case["state"], case["keep"]} != {"none", "cpu", None}
    )


def draw(chance, **fixed):
    """Return a case, with these values."""
    while not allowed(case := {name: chance.choice(values) for name, values in COLUMNS.items()} | fixed):
        pass
    return case


def draw_all(chance, number, fixed):
    """Return so many cases; each run in memory serves some of them."""
    cases = []
    while len(cases) < number:
        first = draw(chance, **fixed)
        alike = fixed | {name: first[name] for name in OF_THE_RUN}
        cases += [first, *(draw(chance, **alike) for _ in range(ALIKE - 1))]
    return cases[:number]


class Adapted(Layer):
    """A layer whose matrices are frozen, or codes beside them, and an adapter."""

    def __init__(self, width, base):
        super().__init__(width)
        for frozen in (self.up, self.down):
            frozen.requires_grad_(False)
        self.is_packed = base == "packed"
        if base in ("uint8", "packed"):
            codes = torch.randint(0, 255, (width, width // 2 if self.is_packed else width), dtype=torch.uint8)
            self.codes = nn.Parameter(codes, requires_grad=False)
        self.thin, self.wide = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, hidden):
        found = self.norm(hidden)
        added = self.wide(self.thin(found))
        if hasattr(self, "codes"):
            codes = torch.cat((self.codes & 15, self.codes >> 4), 1) if self.is_packed else self.codes
            added = added + nn.functional.linear(found, (codes.to(found.dtype) - 100) * 0.001)
        return super().forward(hidden) + added


def model_of(case):
    torch.manual_seed(0)
    width = WIDE if "int8" in case["rule"] else WIDTH
    model = Model(num_layers=LAYERS, width=width, tied=case["base"] is None, checkpointing=case["checkpointing"])
    if case["base"] is not None:
        model.embedding.requires_grad_(False)
        model.layers = nn.ModuleList(Adapted(width, case["base"]) for _ in range(LAYERS))
    if case["base"] not in (None, "frozen"):  # so that files say all of it
        for param in filter(is_base, model.parameters()):
            param.data = param.data.to(KEPT.get(case["precision"], torch.float32)).float()
    return model


def is_base(param):
    return param.is_floating_point() and not param.requires_grad


def published(case):
    """The file of a case's base and first values: what is frozen has the dtype that it is kept in."""
    kept = KEPT.get(case["precision"], torch.float32)
    params = model_of(case).named_parameters()
    return save({name: param.to(kept) if is_base(param) else param for name, param in params})


def engine_of(path, case, name):
    """Born in place from one file for all lives of a run, or around a model with values."""
    if not case["in_place"]:
        return initialize(model_of(case), config_of(path, case, name))
    be_alone()  # where there are no ranks
    file = path / BASE
    if dist.get_rank() == 0 and not file.exists():
        file.with_suffix(".new").write_bytes(published(case))
        file.with_suffix(".new").replace(file)
    dist.barrier()
    with torch.device("meta"):
        model = model_of(case)
    return initialize(model, config_of(path, case, name), weights=file)


def config_of(path, case, name):
    tiers = {key: case[key] for key in ("grads", "state")}
    tiers |= {"accumulation": case["count"], "buffer_count": case["buffers"], "stage": case["stage"]}
    config = section(path, case["params"], **tiers)
    if case["every"]:
        lasting = {"durable": name or "run", "rewrite_every": case["every"], "staging_budget": "4MiB"}
        config["zero_optimization"]["offload_optimizer"] |= lasting
    if case["keep"]:
        kept = {"device": "nvme", "nvme_path": str(path), "keep": case["keep"], "host_budget": "4KiB", "min_bytes": 0}
        config["activations"] = kept
    engine, depth, size = case["aio"]
    return (
        config
        | DTYPES[case["precision"]]
        | {
            "optimizer": RULES[case["rule"]],
            "gradient_clipping": case["clip"],
            "overlap_step": case["schedule"],
            "micro_batch_order": case["order"],
            "aio": {"engine": engine, "queue_depth": depth, "block_size": size, "direct": "optional"},
            **({"skip_non_finite": False} if case["schedule"] == "backward" else {}),
        }
    )


def train(path, name, note, case, mistake=False):
    """Do all steps of a case, from the latest that is committed if it lasts; return a digest of each tensor."""
    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        be_eager(patch)
        if mistake:
            end_all_but_the_latest(patch)
        with engine_of(path, case, name) as engine:
            layers = list(engine.module.layers)
            for number, layer in enumerate(layers if case["ahead"] and case["ranks"] > 1 else ()):
                layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + case["ahead"]])
            norms = []
            for step in steps_left(engine, name, note) if note else range(STEPS):
                take_step(engine, case, step)
                if case["parks"]:
                    engine.park()
                norms.append(engine.get_global_grad_norm())
            assert bool(engine.optimizer.store.blocks.bases) == case["in_place"]
            state = {key: digest_of([value]) for key, value in full_state(engine.module, engine.optimizer).items()}
    assert not case["in_place"] or (path / BASE).read_bytes() == published(case)
    return state if note else state | {"norms": repr(norms)}


def take_step(engine, case, step):
    if case["uses"]:
        engine.module.uses = case["uses"][step % len(case["uses"])]
    loss = partial(_loss, engine, step, case["overflows"] and step % 5 == 2)
    if case["order"] == "vertical":
        engine.accumulate(loss, range(case["count"]))
        engine.step()
    for micro in range(case["count"] if case["order"] == "horizontal" else 0):
        engine.backward(loss(micro))
        engine.step()


def _loss(engine, step, overflows, micro):
    loss = loss_of(engine, step, micro, dist.get_rank())
    return loss * torch.inf if overflows else loss


def train_and_join(path, name, note, case):
    """As a life of `killed_steps`: all digests in one text."""
    return json.dumps(train(path, name, note, case))


def check(rank, world_size, path, cases, mistake):
    """Return what differs in each case from the same run in memory; None where the section was refused."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found, of_the_run, expected = [], None, None
    for number, case in enumerate(cases):
        try:
            folder = path / f"{number}"
            folder.mkdir(exist_ok=True)
            ours = train(folder, None, None, case, mistake)
        except ConfigError as refused:
            found.append(f"refused: {refused}")
            continue
        if of_the_run != (of_the_run := {name: case[name] for name in OF_THE_RUN}):
            expected = train(path, None, None, case | IN_MEMORY)
        found.append(" ".join(key for key in expected if expected[key] != ours[key]))
    return found


def run(root, cases, mistake=False):
    """Run cases of one number of ranks; return what was wrong with each, or nothing. One that fails is run alone."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        try:
            said = run_ranks(check, cases[0]["ranks"], Path(folder), cases, mistake)
        except AssertionError as failed:
            if len(cases) == 1:
                return [f"failed: {failed}"]
            return [wrong for case in cases for wrong in run(root, [case], mistake)]
    return [" ".join(dict.fromkeys(filter(None, of_case))) for of_case in zip(*said, strict=True)]


def main(arguments=None):
    """Run so many, kill so often; print what came of it as one line of JSON. Returns whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mistake", action="store_true")
    parser.add_argument("--case", type=ast.literal_eval, help="as it was printed")
    parser.add_argument("--fixed", type=ast.literal_eval, default={}, help="all cases have these values")
    given = parser.parse_args(arguments)
    be_ready_to_fork()
    fork_here()  # ranks need not import everything once more
    chance = random.Random(given.seed)
    cases = [given.case] if given.case else draw_all(chance, given.runs, given.fixed)
    report = {"runs": 0, "refused": 0, "wrong": 0, "kills": 0}
    for ranks in (1, 2):
        alike = [case for case in cases if case["ranks"] == ranks]
        for first in range(0, len(alike), AT_ONCE):
            part = alike[first : first + AT_ONCE]
            for case, wrong in zip(part, run(given.folder, part, given.mistake), strict=True):
                _count(report, case, wrong)
    while report["kills"] < given.kills:
        case = draw(chance, state="nvme", every=chance.choice((1, 3)), **given.fixed)
        name = f"drawn-{report['kills']}"
        KINDS[name] = Kind(train_and_join, case["ranks"], {"case": case}, {"case": case | IN_MEMORY})
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            try:
                done = kill(Path(folder), name, min(4, given.kills - report["kills"]), chance.randrange(1 << 20), None)
                report["kills"] += done["kills"]
                wrong = ""
            except AssertionError as failed:
                report["kills"] += 1
                wrong = f"failed: {failed}"
        _count(report, case, wrong)
    sys.stdout.write(json.dumps(report) + "\n")
    return bool(report["wrong"])


def _count(report, case, wrong):
    report["runs"] += 1
    if wrong.startswith("refused"):
        report["refused"] += 1
    elif wrong:
        report["wrong"] += 1
    if wrong:
        sys.stdout.write(f"{wrong[-2000:]}\n  --case {str(case)!r}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    from tests.support import drawn_runs  # what ranks are sent is of the module, and not of the program

    sys.exit(drawn_runs.main())

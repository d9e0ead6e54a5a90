"""An engine that saves, loads, exports and is born, on a file system that a kill or a power loss may cut off."""

import functools
import gc
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvme_offload import CheckpointWriteError, StateError, WeightsError, initialize
from nvme_offload.offload.weights.reader import SafetensorsReader
from nvme_offload.optim.checkpoint.files import PARTIAL, REPLACED
from nvme_offload.optim.state.condition import StepPhase
from tests.support.power_loss import Recording
from tests.support.sharded_model import digest_of, full_state, whole
from tests.support.simulator.case import Strike
from tests.support.simulator.run import Player
from tests.support.simulator.subjects.base import Subject, aio_options

TAGS = ("a", "b", None)
LEFTOVERS = (PARTIAL, REPLACED, ".nvme-offload-unmarked")
"""Names of what a save that was cut short may leave, until the next one, end with these."""
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BLOCKS = BF16 | {"gradient_accumulation_steps": 2}
IN_BACKWARD = {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False}
MODES = {"fp32": {}, "bf16": BF16, "blocks": BLOCKS, "blocks, updated in backward": BLOCKS | IN_BACKWARD}
"""Their sections say this besides; where they are in blocks, parameters and gradients are on NVMe, too."""
MOST_STEPS = 6
SHARD_BYTES = 300  # of an exported file: several for the model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(values))) * self.scale.sum()


def made(mode: str, seed: int, offload: dict[str, Any], aio: dict[str, Any], order: str = "auto", **more: Any) -> Any:
    """An engine of the model; `seed` None: on meta."""
    torch.manual_seed(seed)
    zero: dict[str, Any] = {"stage": 2, "offload_optimizer": offload}
    tiers: dict[str, Any] = {}
    if mode.startswith("blocks") and (path := offload.get("nvme_path")):
        tier = {"device": "nvme", "nvme_path": path, "buffer_count": 2}
        zero |= {"stage": 3, "offload_param": tier}
        tiers = {"offload_gradients": tier, "micro_batch_order": order}
    section = {"zero_optimization": zero, **tiers, "aio": aio, "gradient_clipping": 0.5}
    section["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    section |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}, **MODES[mode]}
    with torch.device("meta" if more else "cpu"):
        model = Model()
    return initialize(model, section, blocks=("first", "second") if tiers else None, **more)


def batches_of(engine: Any, step: int) -> torch.Tensor:
    return torch.randn(engine.gradient_accumulation_steps, 3, 8, generator=torch.Generator().manual_seed(step))


def loss_of(engine: Any, values: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(values).float().square().mean()
    return loss


def train(engine: Any, step: int) -> None:
    for values in batches_of(engine, step):
        engine.backward(loss_of(engine, values))
        engine.step()


class Training:
    """Digests of an engine that lives in memory and is never disturbed, step by step."""

    def __init__(self, mode: str) -> None:
        self.positions: dict[str, int] = {}
        self.digests: list[str] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        engine = made(mode, 0, {"device": "cpu"}, {})
        self._note(engine)
        for step in range(MOST_STEPS):
            train(engine, step)
            self._note(engine)
        engine.close()

    def _note(self, engine: Any) -> None:
        self.digests.append(digest_of(engine))
        self.positions[self.digests[-1]] = len(self.digests) - 1
        values = {name: value.detach() for name, value in engine.module.state_dict().items()}
        self.weights.append({name: whole(value).clone() for name, value in values.items()})


@functools.cache
def training(mode: str) -> Training:
    """What every case is compared with: made before the first of them, for it takes part in the world it is made in."""
    return Training(mode)


def make_group() -> None:
    """The process group that every case needs, by the way: the first engine makes it."""
    made("fp32", 0, {"device": "cpu"}, {}).close()


class CheckpointSubject(Subject):
    """After each call that was cut short a folder holds the run before or the run after; a resumed run goes on."""

    weight = 4
    calls = {"step": 5, "save": 4, "load": 2, "crash": 4, "export": 2, "crash_export": 2, "born": 1}  # noqa: RUF012
    most_calls = MOST_STEPS - 1

    @staticmethod
    def draw_options(draw: random.Random) -> dict[str, Any]:
        options = {**aio_options(draw), "mode": draw.choice(sorted(MODES)), "patience": draw.randint(0, 4)}
        return options | {"order": draw.choice(("vertical", "vertical", "horizontal"))}

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        self.swap, self.disk = player.folder / "swap", player.folder / "disk"
        self.swap.mkdir()
        self.disk.mkdir()
        self.num_disks = 0
        self.training = training(self.options["mode"])
        self.patience = self.options["patience"]
        self.saved: dict[str, int] = {}  # positions by tag
        self.unnamed: dict[str, set[int]] = {}  # what a tag may hold that `latest` did not get to name
        self.latest: str | None = None
        self.exported: int | None = None
        self.position = 0
        self.engine: Any = None
        self.engine = self._engine(0)

    @property
    def in_blocks(self) -> bool:
        return self.options["mode"].startswith("blocks")

    @property
    def updates_in_backward(self) -> bool:
        return "overlap_step" in MODES[self.options["mode"]]

    @property
    def root(self) -> Path:
        return self.disk / "runs" / "one"

    @property
    def weights(self) -> Path:
        return self.disk / "weights"

    def do_step(self, draw: random.Random, strike: Strike | None) -> None:
        in_passes = self.in_blocks and draw.random() < 0.6
        try:
            self._struck(strike if in_passes else None, lambda: self.attempt(self._go_through_blocks))
            self._struck(None if in_passes else strike, lambda: self.attempt(self._step))
            self._persist(self._step)
        except StateError:
            raised = strike is not None and strike.kind.startswith("raise")
            assert self.updates_in_backward or raised, "Ctrl-C is held back where a step could not be finished"
            self._go_back()
            return
        except AttributeError as error:
            if "'FSDPParam' object has no" not in str(error):
                raise
            self._close()  # what FSDP2 does in its first forward was cut short
            self.engine = self._engine(0)
            self._go_back()
            return
        self.position += 1
        assert self.engine.lr_scheduler.last_epoch == self.position, "the schedule is not where the steps are"

    def _go_through_blocks(self) -> None:
        if self.in_blocks and self.engine.global_steps == self.position and not self.engine.micro_steps:
            engine = self.engine
            engine.accumulate(lambda values: loss_of(engine, values), batches_of(engine, self.position))

    def _step(self) -> None:
        """Go through what is left of the step, if anything is."""
        self._go_through_blocks()
        if self.engine.global_steps > self.position:
            return
        if not self.in_blocks and not self.engine._accumulation.has_backward:
            self.engine.backward(loss_of(self.engine, batches_of(self.engine, self.position)[0]))
        self.engine.step()

    def do_save(self, draw: random.Random, strike: Strike | None) -> None:
        tag = draw.choice(TAGS)
        name, before = tag or f"global_step{self.position}", self._names()
        save = functools.partial(self.engine.save_checkpoint, self.root, tag)
        error, cut = self._struck(strike, lambda: self._disk_attempt(save))
        if cut is not None:
            self._look(name)
        elif error is not None:
            # It leaves what was left before where it ended with an error from behind a step.
            named = {name for name in before if not name.endswith(LEFTOVERS)}
            assert self._names() in (before, named), f"a save that failed left {self._names()}"
        else:
            self.saved[name], self.latest = self.position, name

    def do_load(self, draw: random.Random, strike: Strike | None) -> None:
        if self.latest is None:
            return
        tag = draw.choice([None, *self.saved])
        self._load(tag, self.saved[tag or self.latest], strike)

    def do_crash(self, draw: random.Random, strike: Strike | None) -> None:
        """Killed, or without power, anywhere in a save; the next process goes on with what is there."""
        tag = draw.choice(TAGS)
        name = tag or f"global_step{self.position}"
        with Recording(self.disk) as recording:
            self._persist(lambda: self.engine.save_checkpoint(self.root, tag))
            recording.mark("saved")
        crash = recording.history().some_crash(draw)
        self._move_to(crash)
        if "saved" in crash.marks:
            self.saved[name], self.latest = self.position, name
        self._close()
        self.engine = self._engine(1)
        self._look(name)

    def do_export(self, draw: random.Random, strike: Strike | None) -> None:
        error, cut = self._struck(strike, lambda: self._disk_attempt(self._export))
        whole = error is None and cut is None
        self._check_export({self.position} if whole else {self.exported, self.position}, whole=whole)

    def do_crash_export(self, draw: random.Random, strike: Strike | None) -> None:
        with Recording(self.disk) as recording:
            self._persist(self._export)
            recording.mark("exported")
        crash = recording.history().some_crash(draw)
        self._move_to(crash)
        done = "exported" in crash.marks
        self._check_export({self.position} if done else {self.exported, self.position}, whole=done)

    def do_born(self, draw: random.Random, strike: Strike | None) -> None:
        """A model on meta gets its values from what was exported."""
        if self.exported is None:
            return
        born = self._engine(3, weights=self.weights)
        found = self._persist(lambda: full_state(born.module, born.optimizer))
        for name, value in self.training.weights[self.exported].items():
            assert torch.equal(found[name], value), f"{name} was born with other values"
        born.close()

    def finish(self) -> None:
        engine = self.engine
        self._persist(lambda: None)
        self._check_position()
        train(engine, self.position)
        self.position += 1
        self._check_position()
        engine.save_checkpoint(self.root, "last")
        self._close()
        self.engine = self._engine(2)
        self.engine.load_checkpoint(self.root)
        self._check_position()
        names = self._names() - {"a", "b", "last", "latest"}
        assert all(re.fullmatch(r"global_step\d+", name) for name in names), f"left behind: {names}"
        self._close()
        self.swap.rmdir()
        for disk in self.player.folder.glob("disk*"):
            shutil.rmtree(disk)

    # Calls that fail.

    def _struck(self, strike: Strike | None, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """The error of a call, and what struck it."""
        outcome, cut = self.player.struck(strike, call)
        self._finish_behind()
        return (None, cut) if cut is not None else (outcome[1], None)

    def _disk_attempt(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """`attempt`, on a disk that may be full."""
        try:
            return self.attempt(call)
        except CheckpointWriteError as error:
            if not self.case.full_at:
                raise
            return None, error

    def _patient(self, call: Callable[[], Any]) -> BaseException | None:
        error = self._disk_attempt(call)[1]
        if error is not None:
            self.patience -= 1
            self.drive.well = self.drive.well or self.patience <= 0
            assert self.patience > -8, f"the drive is well: {error!r}"
            self._finish_behind()
        return error

    def _finish_behind(self) -> None:
        """Finish a step whose updates failed behind it, and whose gradients are still there: nobody saves before."""
        optimizer = self.engine.optimizer if self.engine is not None else None
        if optimizer is None or not optimizer.store.has_unfinished_step:
            return
        if optimizer.store.record_in(StepPhase.STOPPED) is not None:
            self._patient(optimizer.finish_step)

    def _persist(self, call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        while self._patient(lambda: found.append(call())) is not None:
            continue
        return found[-1]

    # What is there.

    def _engine(self, seed: int, **more: Any) -> Any:
        """A new process, as far as memory goes."""
        offload = {"device": "nvme", "nvme_path": str(self.swap), "staging_budget": "4MiB", "buffer_count": 2}
        order = self.options["order"]
        return self._persist(lambda: made(self.options["mode"], seed, offload, self.aio, order, **more))

    def _close(self) -> None:
        if self.attempt(self.engine.close)[1] is not None:  # of updates behind a step
            self.engine.close()
        self.engine = None
        gc.collect()

    def _export(self) -> None:
        self.engine.export_safetensors(self.weights, max_shard_bytes=SHARD_BYTES)

    def _names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()} if self.root.is_dir() else set()

    def _check_position(self) -> None:
        found = self._persist(lambda: digest_of(self.engine))
        known = self.training.positions.get(found, "no known")
        assert known == self.position, f"the engine is at {known} step, not at {self.position}"

    def _load(self, tag: str | None, position: int, strike: Strike | None) -> None:
        self._struck(strike, lambda: self._disk_attempt(lambda: self.engine.load_checkpoint(self.root, tag)))
        path, _ = self._persist(lambda: self.engine.load_checkpoint(self.root, tag))
        assert path is not None
        self.position = position
        self._check_position()

    def _go_back(self) -> None:
        """To what was saved last, or to the beginning."""
        if self.latest is not None:
            self._load(None, self.saved[self.latest], None)
        else:
            self._close()
            self.engine, self.position = self._engine(0), 0

    def _look(self, name: str) -> None:
        """After a save that was cut short each checkpoint is whole, that there was or the new one; go on from it."""
        possible = {tag: {position} for tag, position in self.saved.items()}
        possible[name] = {self.position} | possible.get(name, set()) | self.unnamed.get(name, set())
        path, _ = self._persist(lambda: self.engine.load_checkpoint(self.root))
        if path is None:
            assert self.latest is None, "the checkpoint before was lost"
            self.unnamed[name] = possible[name]
            self._go_back()
            return
        found = Path(path).name.removesuffix(REPLACED)
        assert found in (self.latest, name), f"{found} is neither the one before nor the new one"
        there = (self.root / name).is_dir() or (self.root / (name + REPLACED)).is_dir()
        for tag in {*self.saved, *([name] if there else [])}:
            self._persist(lambda tag=tag: self.engine.load_checkpoint(self.root, tag))
            position = self.training.positions.get(self._persist(lambda: digest_of(self.engine)))
            assert position in possible[tag], f"{tag} holds step {position}, not one of {possible[tag]}"
            self.saved[tag] = position
        self.latest = found
        self._go_back()

    def _check_export(self, possible: set[int | None], *, whole: bool) -> None:
        """The folder holds one of these exports, or, where it was cut off, one that is refused."""
        try:
            with SafetensorsReader(self.weights) as reader:
                found = {name: reader.read(name).view(entry.shape) for name, entry in reader.tensors.items()}
        except WeightsError:
            assert not whole, "a whole export is refused"
            self.exported = None
            return
        for position in possible - {None}:
            expected = self.training.weights[position]
            if expected.keys() == found.keys() and all(torch.equal(expected[n].float(), found[n]) for n in found):
                self.exported = position
                return
        raise AssertionError(f"a mixture of exports: none of {possible}")

    def _move_to(self, crash: Any) -> None:
        """From here on the disk is what the crash left."""
        self.num_disks += 1
        self.disk = Path(crash.restore(self.player.folder / f"disk{self.num_disks}"))

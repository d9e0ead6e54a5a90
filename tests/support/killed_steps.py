"""A training that is killed with SIGKILL again and again, at random instants, and goes on from its latest step.

Runs in a process of its own, which imports torch once and forks each life of the training.
"""

import hashlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

from nvme_offload import OffloadAdamW
from tests.support.training import params_of, section

SHAPES = [(70_001,), (999,), (65_537,), (5,), (9_999,)]
DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
NUM_STEPS = 16
_PAGE = struct.Struct("<qqq")  # resumed at, steps begun, steps that returned
_ATTEMPTS = 400


def durable_section(path, name, *, rewind_steps=1, rewrite_every=1, **more):
    made = section(path, sub_group_size=65536, clip=1.0, **more)
    offload = made["zero_optimization"]["offload_optimizer"]
    offload["staging_budget"] = "8MiB"
    if name:
        offload |= {"durable": name, "rewind_steps": rewind_steps, "rewrite_every": rewrite_every}
    return made


def gradients_of(params, step):
    """From torch's own random numbers, which a resumed run must have back; now and then none, or one not finite."""
    for number, param in enumerate(params):
        grad = (torch.randn(param.shape) * 0.1).to(param.dtype)
        param.grad = None if number == step % 7 else grad
    if step % 11 == 5 and params[2].grad is not None:
        params[2].grad[0] = float("inf")


def digest_of(optimizer, params):
    digest = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    tensors = [*params, *(value for entries in state.values() for value in entries.values())]
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def live(path, name, note, **more):
    """Train to the end, from the latest step that is committed if there is one; the digest of all that came out."""
    torch.manual_seed(7)
    params = params_of(SHAPES, *DTYPES)
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]
    with OffloadAdamW(groups, offload=durable_section(path, name, **more)) as optimizer:
        found = optimizer.resume() if name else None
        step, position = (found[0], found[1]["position"]) if found else (0, 0)
        assert step == position, (step, position)
        note(step, 0, 0)
        for number in range(step, NUM_STEPS):
            note(step, number + 1, number)
            gradients_of(params, number)
            optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            if name:
                optimizer.client_state["position"] = number + 1
            if number % 13 == 4:
                with torch.no_grad():
                    params[0][:70] += 1
                    params[1][:7] -= 1
            optimizer.step()
            note(step, number + 1, number + 1)
        return digest_of(optimizer, params)


def fork(life):
    """A process of its own for a life; its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        life()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Lives:
    """Lives of one run, and what they noted in memory that outlives them."""

    def __init__(self, path, name, seed, **more):
        self.path, self.name, self.more = path, name, more
        self.random = random.Random(seed)
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        self.end = path / f"{name or 'plain'}.end"
        self.history = []

    def _life(self):
        def note(*numbers):
            self.page[: _PAGE.size] = _PAGE.pack(*numbers)

        self.end.write_text(live(self.path, self.name, note, **self.more))

    def digest(self, seconds=None):
        """Live once, killed after so many seconds; the digest of a life that came to its end, or None."""
        finished = _PAGE.unpack(self.page[: _PAGE.size])[2]
        self.page[: _PAGE.size] = _PAGE.pack(-1, 0, 0)
        pid = fork(self._life)
        killed = seconds is not None and self._kill(pid, seconds)
        _, status = os.waitpid(pid, 0)
        assert killed or status == 0, f"{self.name}: a life ended with status {status}"
        resumed, _, returned = _PAGE.unpack(self.page[: _PAGE.size])
        if resumed >= 0:
            assert finished - 1 <= resumed <= finished + 1, f"{self.name}: {finished} steps done, resumed at {resumed}"
            self.history.append(resumed)
        if resumed < 0 or returned == 0:
            self.page[: _PAGE.size] = _PAGE.pack(resumed, 0, finished if resumed < 0 else resumed)
        return self.end.read_text() if status == 0 else None

    def _kill(self, pid, seconds):
        """After so many seconds; most of the time not before the training has begun."""
        if self.random.random() < 0.8:
            while _PAGE.unpack(self.page[: _PAGE.size])[0] < 0 and not _has_ended(pid):
                time.sleep(0.001)
        time.sleep(seconds)
        if _has_ended(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        return True


def _has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


KINDS = {
    "on-nvme": {},
    "in-memory-too": {"host_budget": "7MiB"},
    "logged": {"rewrite_every": 3, "buffers": 2},
    "logged-in-memory-too": {"rewrite_every": 3, "buffers": 2, "host_budget": "7MiB"},
}


def main(root, num_kills, seed, *names):
    """Kill each of these kinds of run so often, and print how often, and which digests differ from that of no kill."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.compiler.disable(lambda: None)()  # imports what every life would import once more
    root = Path(root)
    begun = time.monotonic()
    expected = Lives(root, None, seed).digest()
    seconds = time.monotonic() - begun
    outcomes = {}
    for name in names:
        more = KINDS[name]
        done = rounds = 0
        history = []
        while done < num_kills:
            lives = Lives(root, f"{name}-{rounds}", seed + rounds, **more)
            for _ in range(_ATTEMPTS):
                digest = lives.digest(lives.random.uniform(0, 0.4 * seconds) if done < num_kills else None)
                if digest is not None:
                    break
                done += 1
            assert digest == expected, f"{lives.name} (seed {seed + rounds}): other bits, resumed at {lives.history}"
            history.append(lives.history)
            rounds += 1
        outcomes[name] = {"kills": done, "history": history}
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])

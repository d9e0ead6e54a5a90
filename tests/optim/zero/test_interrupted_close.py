"""A `close()` of an engine that was cut short anywhere, by somebody who only lets the engine go then."""

import gc
import threading

import pytest
import torch.distributed as dist

from tests.support.interrupts import STRIKES, every, strided, struck
from tests.support.tiers import EVERYTHING, make, section, train_step


@STRIKES
@strided(811)
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_an_engine_whose_close_was_cut_short_leaves_nothing(alone, tmp_path, overlap, strike, stride):
    """No thread and no file, although FSDP2 keeps a module that was trained, and with it the optimizer."""
    tiers = EVERYTHING if overlap == "off" else {"state": "nvme", "accumulation": 1}
    config = {**section(tmp_path, **tiers), "overlap_step": overlap}
    before = set(threading.enumerate())
    for interrupt in every(stride, strike):
        engine = make(config, num_layers=2)
        train_step(engine, 0)
        struck(interrupt, engine.close)
        if interrupt.place.endswith("(close, after RESUME)") or "finalizing.py" in interrupt.place:
            engine.close()  # it had not begun, perhaps
        del engine
        interrupt.kept = None  # what its frames hold
        gc.collect()
        assert not set(threading.enumerate()) - before, interrupt.place
        assert not list(tmp_path.iterdir()), interrupt.place
        if dist.is_initialized():
            dist.destroy_process_group()

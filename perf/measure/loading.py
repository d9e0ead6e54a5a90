"""Modules are loaded at the price of loading them."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """Load modules in the block: nothing is searched for garbage then, of which there is none.

    Searches take a quarter of the time that torch and transformers need to be loaded. Later searches leave out what was
    loaded, but for those at the end of the process: libraries free there what they have, or say that it leaked.
    """
    gc.disable()
    atexit.register(gc.unfreeze)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

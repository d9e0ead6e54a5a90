"""Modules are loaded at the price of loading them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """Load modules in the block: nothing is searched for garbage then, of which there is none.

    Searches take a quarter of the time that torch and transformers need to be loaded. What was loaded is left out of
    later ones as well.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

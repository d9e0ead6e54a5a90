"""What a drive may hold after a kill or a power loss, by the rules of ALICE (Pillai et al., OSDI 2014).

A `Recording` notes every file operation below a folder. Its `History` says for every moment what a drive may hold:

- A kill loses the process alone. Every call that returned is there; of an engine's transfers that were under way a part
  is.
- A power loss keeps what an fsync covers: of a file its bytes and its length, of a folder its names. Of everything else
  any part may be there, in any order: one sector of a write and not its neighbour, a length without the bytes, a rename
  before the bytes of what it names. What is written through a descriptor with O_DSYNC is covered alone.
- Names in one folder that one call changes, change together. A rename from one folder to another is there in both, or
  in the new one alone.
"""

from tests.support.power_loss.history import Crash, History
from tests.support.power_loss.recorded_engine import RecordedEngine
from tests.support.power_loss.recording import Recording

__all__ = ["Crash", "History", "RecordedEngine", "Recording"]

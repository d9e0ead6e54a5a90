"""Whether pictures can be drawn here."""

from importlib.util import find_spec

NO_PICTURE = "no picture: matplotlib is not installed; type: pip install 'nvme-offload[pictures]'"


def can_draw() -> bool:
    """Whether matplotlib is there, which only pictures need."""
    return find_spec("matplotlib") is not None

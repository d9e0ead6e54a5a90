"""What works with whose package, as its tests say it: the rows of docs/clients.md."""

import pytest

UNCHANGED, WITH_A_LINE, NOT_AT_ALL = "unchanged", "with a line", "not at all"


def client(package, what, works=UNCHANGED, remark=""):
    """Mark a test that shows how something of a package works, and how much has to be written for it.

    A test of what does not work at all passes where it is refused in words.
    """
    return pytest.mark.client(package, what, works, remark)

"""A deterministic simulator: one seed chooses everything that can happen to this package, and nothing else happens.

A seed makes a `Case`: a subject (engine and tier, swapper, optimizer, gathers), a list of calls, and what strikes
them. The case runs in a `World`: threads of ours that the seed steps, a clock that moves only when everybody waits, and
a drive whose completions come in the order and with the faults that the seed says. After each case the bits are
compared with a model in memory, and nothing may be left: no buffer, descriptor, thread or file.

``python -m tests.support.simulator 17`` replays a seed, ``0:20000 --workers 2`` runs many; see `__main__`.
"""

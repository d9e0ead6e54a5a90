"""A stand-in for a GPU that is as late as the rules allow, in plain Python on the CPU.

What is queued on a stream runs when somebody waits for it, and not before: a copy that nobody waits for never happens.
Until then its destination holds poison. So whoever reads too early, writes too early or frees too early gets other
bits, in every run; no timing hides it.
"""

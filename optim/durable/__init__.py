"""Steps that last: what a commit holds, when it is taken, and how a run goes on from one."""

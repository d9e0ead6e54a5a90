"""`offload report`: one page of HTML about a run or a benchmark, with its pictures in it."""

"""`offload report`: one page of HTML about a run."""

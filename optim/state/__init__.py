"""The optimizer's state: what it is, where it is, how it is reached."""

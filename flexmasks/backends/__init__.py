"""Backends: a planned call comes in, the output and lse go out, from the best kernel that can run the call."""

"""Backends: a planned call comes in, the output and lse go out.

The fastest backend that can run a call runs it.
"""

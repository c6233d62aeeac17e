"""Integrations: calls of other libraries come in, calls of the public functions go out."""

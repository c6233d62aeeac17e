"""Plots of the committed results."""


def page() -> str:
    """Return the page of all plots."""
    return "# Plots\n"

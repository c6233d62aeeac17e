"""Pictures: a mask or score comes in, a drawing goes out.

The drawing is text, SVG, HTML or a matplotlib figure.
"""

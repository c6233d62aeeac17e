"""Pictures: a mask or score comes in, a drawing goes out.

It is text, SVG, HTML or a matplotlib figure.
"""

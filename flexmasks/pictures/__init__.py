"""Pictures: a mask or score comes in, text, SVG, HTML or a matplotlib figure goes out."""

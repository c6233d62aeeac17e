"""Block lists: a mask's function and lengths come in, the exact empty, partial and full blocks go out."""

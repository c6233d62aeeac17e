"""Plans: values and sizes come in, what a kernel takes goes out.

The values are Masks and Scores, the sizes those of a call.
"""

"""Plans: a Mask or Score and the sizes of a call come in, what a kernel takes goes out."""

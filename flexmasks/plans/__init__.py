"""Plans: masks, scores and sizes of a call come in, a kernel's arguments go out."""

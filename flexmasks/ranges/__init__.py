"""Evaluation on ranges: a mask's function comes in, what it certainly and possibly shows of each block goes out."""

"""What a mask or a score is: a function and its parameters come in, checked values (Mask, Score) go out."""

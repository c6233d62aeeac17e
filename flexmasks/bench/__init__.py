"""The demo, and the times of a call of the user's own."""

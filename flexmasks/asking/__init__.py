"""Questions about masks: are two the same, and what is wrong with one."""

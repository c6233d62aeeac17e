"""Benchmarks and the demo: names of cases come in, measured tables and results files go out."""

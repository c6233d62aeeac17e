"""Benchmarks and the demo: cases come in, tables and results files go out."""

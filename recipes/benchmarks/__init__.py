"""Benchmarks: cases come in, tables and results files go out."""

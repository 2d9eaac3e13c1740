"""Benchmarks: cases, plain PyTorch implementations for comparison, records and reports."""

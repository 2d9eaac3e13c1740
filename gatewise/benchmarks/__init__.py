"""Benchmarks that anyone can repeat: cases, plain PyTorch rivals, records and reports."""

"""Benchmarks: `phub bench exchange`, `phub bench select`, `phub bench kernels`."""

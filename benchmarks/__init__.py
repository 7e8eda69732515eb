"""Benchmarks: they print the tables that the README quotes. Speed is measured interleaved, as ratios."""

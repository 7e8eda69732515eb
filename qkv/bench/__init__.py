"""Measuring: one subject a file, each a table of what qkv does beside what else there is, in the same run."""

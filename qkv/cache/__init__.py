"""The KV cache, framework-free: blocks, codecs, layers, retention, shared prefixes, attention over blocks."""

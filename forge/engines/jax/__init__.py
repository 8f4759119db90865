"""Gemma 4 in JAX: the only part of an engine that knows JAX."""

"""Runtimes: what loads the weights. Runtimes know no plane."""

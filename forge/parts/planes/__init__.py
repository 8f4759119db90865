"""Planes: where a machine comes from and goes back to. Planes know no runtime."""

"""Boundaries: one module for each outside thing that is spoken to or read."""

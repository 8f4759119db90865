"""Requests, text, scheduling and HTTP of a model server. Knows no arrays, no architecture."""

"""Requests, text, scheduling and HTTP of a model server. Knows no array library and no architecture."""

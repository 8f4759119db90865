"""Tests of the parts, one module a part."""

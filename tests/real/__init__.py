"""Tests against the real programs: called by `make test-real`, cached outside HOME."""

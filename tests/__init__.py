"""Tests of forge, of its parts, and across the rigs."""

"""Tests of the engines: small checkpoints, real forward passes, real HTTP."""

"""Modules of the programs that run on rented machines: Python 3.10 and its standard library."""

"""What is known about chips, prices and models: data with sources, and the arithmetic on it."""

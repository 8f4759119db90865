"""A rig of a rented machine that does not exist: same parts, another plane, another runtime."""

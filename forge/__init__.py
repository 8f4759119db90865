"""The sources from which the rigs are built; nothing in a rig imports it."""

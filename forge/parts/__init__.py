"""The building blocks of a rig, one concern a module, one folder a section."""

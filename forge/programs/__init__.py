"""Programs that a rig carries beside server.py, each one built file that runs by itself."""

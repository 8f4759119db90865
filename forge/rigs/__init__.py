"""One short module per serving rig: its plane, runtime, model, and what is its own."""

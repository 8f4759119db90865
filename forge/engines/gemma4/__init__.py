"""The architecture of Gemma 4: its config, its tensors, its sizes. Knows numpy alone."""

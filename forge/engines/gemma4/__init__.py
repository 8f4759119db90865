"""The architecture of Gemma 4: config, tensors, sizes. Knows numpy and ml_dtypes alone."""

"""Model servers that some rigs carry: what serves, what a Gemma 4 is, and what computes."""

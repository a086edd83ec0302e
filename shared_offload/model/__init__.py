"""Who computes: the DiT as plain functions over borrowed weights."""

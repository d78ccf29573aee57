"""The graph cache beside torch: batches on a device, and graphs from torch's files."""

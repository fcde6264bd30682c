"""The calls that are drawn, as documents, and their tensors."""

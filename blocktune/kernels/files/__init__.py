"""Files that someone else may have written: their place, owner, text, checksums and signature."""

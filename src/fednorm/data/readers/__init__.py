"""One reader for each family of on-disk forms."""

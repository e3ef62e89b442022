"""The papers' experiments: what was published, how each is played here, and both side by side."""

"""Rewrites of a traced step, each of which leaves the result as it was, up to the order of additions."""

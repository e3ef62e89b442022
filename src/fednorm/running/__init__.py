"""Runs of a federation in one place: config, plan, rounds, store, folders, results."""

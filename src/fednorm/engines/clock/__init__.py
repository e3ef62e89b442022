"""Runs in virtual time: who trains when, and in which order updates come."""

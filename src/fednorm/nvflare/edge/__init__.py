"""Federations of devices: NVFlare's edge tree of server, relays and leaves, with fednorm's two halves at its ends."""

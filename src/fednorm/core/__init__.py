"""The language: what state, methods, phases and steps are. No files, no engines, no command line."""

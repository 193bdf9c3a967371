"""Decisions. Pure: no files, clocks, sockets, logging or environment; time is always an argument."""

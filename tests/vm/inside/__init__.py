"""Tests that run in a guest, never on the host."""

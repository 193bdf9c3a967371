"""Container runtimes: events and names in, pins out."""

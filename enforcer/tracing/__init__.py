"""Loading the eBPF programs, filling their maps, reading their sums."""

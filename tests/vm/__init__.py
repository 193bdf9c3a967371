"""Guests under software emulation: a real cgroup v2 cpuset, NUMA nodes, hyper-threads and systemd as PID 1."""

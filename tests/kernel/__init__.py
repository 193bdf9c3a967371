"""On this machine's real cgroup hierarchies and kernel; as root."""

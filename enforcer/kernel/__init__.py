"""Contact with /sys, /proc and the cgroup file systems. Every module takes its root path as an argument."""

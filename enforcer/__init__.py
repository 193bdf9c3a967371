"""cpuset-enforcer: exclusive CPUs for Guaranteed pods, enforced and proven from the cgroup tree alone."""

__version__ = "0.1.0"

"""Checks of a node, the kubelet's files, and the report."""

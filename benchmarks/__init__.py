"""Measurements that are too long for tests. Each module is a command; docs/log.md has what they printed."""

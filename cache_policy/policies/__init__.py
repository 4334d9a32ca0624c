"""Eviction policies, one file each. ``cache_policy.policy`` names and creates them."""

"""Replicas: what generates text for the gateway, behind one seam."""

"""What is cached, under which key, and who leaves first. Pure Python: no torch, no web framework.

``keys`` names blocks, ``policy`` decides which of them leaves, ``residency`` remembers who holds which.
"""

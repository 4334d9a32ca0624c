"""What is cached, under which key, and who leaves first. Pure Python: no torch, no web framework."""

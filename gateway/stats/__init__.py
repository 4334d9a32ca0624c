"""What prefix caching saved: sums over finished requests, kept in the process and shared through Redis."""

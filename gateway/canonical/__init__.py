"""What Headstart does to a prompt so that its first tokens repeat: small pure stages, each saying what it changed.

``pipeline`` runs them in order; each of the other modules is one stage or one thing that stages work on.
"""

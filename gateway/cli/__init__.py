"""The ``headstart`` command: one file per subcommand, heavy imports only inside the one that needs them."""

"""Which replica gets a request: what each of them holds and how busy it is."""

"""Why tokens of a prompt were not in the cache: every missed token gets one cause, and the causes add up exactly.

``parts`` says what a prompt is made of, ``history`` and ``memory`` what was asked for before, ``causes`` puts the two
together. Offline analysis and live statistics use the same; all memories are bounded.
"""

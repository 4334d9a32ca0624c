"""Logs of request bodies, offline: what a prefix cache finds in them as they are, and what canonicalization would add.

``log`` reads bodies, ``passes`` replays them through the gateway's own request path against simulated caches,
``report`` puts both passes together; ``findings``, ``suggestion`` and ``page`` say it in words, as a configuration and
as a page.
"""

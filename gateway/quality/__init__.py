"""The quality gate: whether another order of documents harms the answers is measured, not believed.

A share of the requests keeps the application's order (the hold-out), so that what reordering earns can be seen. Sampled
requests that were reordered are asked again in the application's order while nobody else wants anything, and a
sequential test per template switches reordering off where the answers suffer more than is allowed.
"""

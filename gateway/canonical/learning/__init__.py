"""Finding the volatile fields of system prompts that no template declares, from live requests or a log.

``learner`` has the one object that learns; ``tokens`` cuts texts, ``skeleton`` aligns them, ``form`` is what is
recognised, ``evidence`` what was seen of a field, ``proposals`` what the operator is shown of all that.
"""

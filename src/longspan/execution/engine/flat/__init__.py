"""Flat: a rank's run as a list of operations, recorded once for a plan and played back in every call.

`recorder` stands in for tensors while the steps of a plan are walked, `grouping` puts operations on rows together,
`moves` are these operations on tensors, and `program` is the list with its messages and launches.
"""

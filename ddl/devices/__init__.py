"""The devices of a process's replicas, and the choices that their kind decides.

A device path makes these choices in one place. All paths compute the same, up to rounding. Tests
run the path of GPUs on CPU devices.
"""

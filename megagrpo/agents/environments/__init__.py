"""Packages of environments as agents, one file each, and the rows that their tasks become.

The files verifiers.py and openenv.py run in the interpreter that has the package, and import nothing else.
"""

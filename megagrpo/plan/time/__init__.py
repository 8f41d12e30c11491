"""How long does a step take, and what takes it?"""

"""How much memory does each device need, phase by phase?"""

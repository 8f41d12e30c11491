"""How do the boxes of a plan move? Through checkpoint files, or from training ranks into engine ranks.

For the latter see `ways.py`: a Sender in every training rank, a Receiver in every engine rank, a Meeting between them.
"""

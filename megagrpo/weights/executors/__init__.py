"""How do the boxes of a plan move? Through checkpoint files, or from training ranks into engine ranks by one of the ways
of `ways.py`: a Sender in every training rank, a Receiver in or beside every engine rank, and a Meeting between them."""

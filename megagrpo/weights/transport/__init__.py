"""How the bytes of a weight plan travel from training ranks to engine ranks; choice.py says where to begin."""

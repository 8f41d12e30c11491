"""`make gpu-check`: what only a GPU can show, in one command. See __main__.py."""

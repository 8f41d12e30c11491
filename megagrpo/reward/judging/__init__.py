"""Asking a model how good a response is: what it is asked, how often and for how much, and what its answer means."""

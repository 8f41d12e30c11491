"""Judging of responses by a model: the rubric, the requests, their budget, and the verdict."""

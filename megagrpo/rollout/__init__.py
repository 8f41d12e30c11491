"""Sampling of responses to prompts by the policy, with the logprob and weight version of each token."""

"""What does the policy answer? Prompts to sampled responses, with the logprob and weight version of each token."""
